//! Downloads that are not complete: what is told of them, and their removal.

use super::*;

#[tokio::test]
async fn what_has_arrived_is_told_and_removed_but_not_while_it_is_fetched() {
    let files = Files::new(1);
    let server = HubServer::start(REPO, &files.list()).await;
    let fetcher = Fetcher::new(&server);
    let (cache, key) = (fetcher.cache(), fetcher.source.key());
    server.file_faults(vec![Fault::IgnoreRange; 5]);
    server.file_faults([Fault::CutAfter(200_000), Fault::Status(400, Vec::new())]);
    fetcher.failure().await;
    assert_eq!(cache.stored().unwrap(), []);
    let told = cache.unfinished().unwrap();
    let [told] = told.as_slice() else {
        panic!("{told:?}")
    };
    let begun = told.begun.clone().unwrap();
    assert_eq!(
        (&told.key, begun.source.as_str()),
        (&key, "acme/poems@main")
    );
    assert_eq!(begun.commit.as_deref(), server.listing()["sha"].as_str());
    let whole_bytes = files.needed_bytes() as u64;
    let here_bytes = whole_bytes - 300_000;
    assert_eq!(
        (told.bytes, told.total_bytes),
        (here_bytes, Some(whole_bytes))
    );
    assert!(!told.is_running);

    // Another process goes on with it.
    server.pace(Duration::from_millis(100));
    let running = fetcher.fetch();
    let removed = async {
        while !cache.unfinished().unwrap().iter().any(|it| it.is_running) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        cache.forget(&key)
    };
    let error = tokio::select! {
        fetched = running => panic!("{fetched:?}"),
        removed = removed => removed.unwrap_err(),
    };
    assert!(matches!(error, FetchError::Busy { .. }), "{error}");
    assert!(error.to_string().contains("acme/poems@main"), "{error}");

    cache.forget(&key).unwrap();
    assert_eq!(cache.unfinished().unwrap(), []);
    let left = fs::read_dir(fetcher.directory.path().join("partial")).unwrap();
    assert_eq!(left.count(), 0);
    server.pace(Duration::ZERO);
    fetcher.fetch().await.unwrap();
    assert_eq!(cache.unfinished().unwrap(), []);
}

#[tokio::test]
async fn a_fetch_that_brought_nothing_is_not_listed() {
    let server = HubServer::start(REPO, &Files::new(1).list()).await;
    server.list_faults([Fault::Status(404, Vec::new())]);
    let fetcher = Fetcher::new(&server);
    fetcher.failure().await;
    server.file_faults([Fault::Status(404, Vec::new())]);
    fetcher.failure().await;
    assert_eq!(fetcher.cache().unfinished().unwrap(), []);
}
