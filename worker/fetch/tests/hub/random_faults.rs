//! Hubs that break at random.

use futures::StreamExt;

use super::*;

/// The property: whatever the servers do, nothing wrong is ever in the model's place, and the fetch ends.
#[tokio::test(flavor = "multi_thread")]
async fn whatever_happens_a_model_is_right_or_absent() {
    const RUNS: u64 = 200;
    const AT_A_TIME: usize = 20;
    let complete = futures::stream::iter(0..RUNS)
        .map(random_faults)
        .buffer_unordered(AT_A_TIME)
        .filter(|is_complete| std::future::ready(*is_complete));
    assert_eq!(complete.count().await as u64, RUNS * 4 / 5);
}

/// Fetches through random faults; returns whether the model came whole before a file was put right again.
async fn random_faults(run: u64) -> bool {
    let files = Files::new(1);
    let needed = files.needed();
    let mut numbers = noise(64, run + 1000).into_iter();
    let mut number = move || usize::from(numbers.next().unwrap_or_default());
    let server = HubServer::start(REPO, &files.list()).await;
    let mut fetcher = Fetcher::new(&server);
    fetcher.options.stall_timeout = Duration::from_millis(500);
    let mut fault = || match number() % 11 {
        0 => Fault::CutAfter(number() * 2000),
        1 => Fault::StallAfter(number() * 2000),
        2 | 3 => Fault::IgnoreRange,
        4 => Fault::IgnoreRangeAndCutAfter(number() * 2000),
        5 => Fault::Chunked,
        6 => Fault::Claim(number() * 3000),
        7 => Fault::Spoil,
        8 => {
            let status = [429, 500, 502, 503][number() % 4];
            Fault::Status(status, vec![("retry-after", "0".to_owned())])
        }
        9 => Fault::Status([401, 403, 404, 416][number() % 4], Vec::new()),
        _ => Fault::CutAfter(1),
    };
    // Only its transport protects the list itself.
    let listed = match fault() {
        Fault::Spoil => Fault::CutAfter(1),
        other => other,
    };
    server.list_faults([listed]);
    let faults: Vec<Fault> = (0..8).map(|_| fault()).collect();
    server.file_faults(faults.clone());
    let is_swapped = run.is_multiple_of(5);
    if is_swapped {
        server.swap(SHARDS[1], &noise(500_000, run + 50));
    }
    // Until the faults are used up; each fetch ends by itself.
    for _ in 0..20 {
        // Another node has the right files, and gives them in its own way.
        if !is_swapped {
            let kind = number();
            fetcher.options.seed = Some(seeds::of_any_kind(&needed, kind, number() * 3000));
        }
        match fetcher.fetch().await {
            Ok(directory) => {
                assert!(!is_swapped, "run {run}: {faults:?}");
                assert_eq!(files_in(&directory), needed, "run {run}: {faults:?}");
                return true;
            }
            Err(error) => {
                assert_eq!(fetcher.cache().model(&fetcher.source.key()), None);
                assert!(error.to_string().contains("\n  "), "{error}");
            }
        }
    }
    server.swap(SHARDS[1], &files.0[SHARDS[1]]);
    let directory = fetcher.fetch().await.unwrap();
    assert_eq!(files_in(&directory), needed, "run {run}");
    false
}
