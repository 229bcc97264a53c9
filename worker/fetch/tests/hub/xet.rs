//! A hub whose files are stored with Xet, and which redirects for each.

use hearth_fetch::Credentials;

use crate::support::Fault;
use crate::support::hub::{Asked, HubServer};
use crate::{Fetcher, Files, REPO, files_in};

#[tokio::test]
async fn files_come_through_redirects_of_every_kind_and_xets_protocol_is_not_used() {
    let files = Files::new(1);
    let server = HubServer::start(REPO, &files.list()).await;
    server.store_with_xet();
    server.open_by("Bearer hush-token");
    // The index, config, template and tokenizer arrive; then the first shard breaks off twice.
    server.file_faults(vec![Fault::IgnoreRange; 4]);
    server.file_faults([Fault::CutAfter(300_000), Fault::CutAfter(250_000)]);
    let mut fetcher = Fetcher::new(&server);
    fetcher.source = fetcher.source.opened_by(Credentials::Bearer {
        token: "hush-token".to_owned(),
    });
    let directory = fetcher.fetch().await.unwrap();
    assert_eq!(files_in(&directory), files.needed());
    let list_bytes = server.listing().to_string().len();
    assert_eq!(
        server.sent_bytes(),
        files.needed_bytes() + list_bytes,
        "bytes came twice"
    );

    let asked = server.asked();
    let (large, own): (Vec<&Asked>, Vec<&Asked>) = asked.iter().partition(|asked| asked.is_large);
    // Both addresses of the other host: that which the hub names, and that which this one does.
    let of_file = |asked: &&&Asked| asked.path.starts_with("/xet-bridge/");
    let last: Vec<&&Asked> = large.iter().filter(of_file).collect();
    assert_eq!((last.len(), large.len()), (5, 10), "{large:?}");
    let ranges = last.iter().filter_map(|asked| asked.headers.range.clone());
    let ranges: Vec<String> = ranges.collect();
    assert_eq!(ranges, ["bytes=300000-", "bytes=550000-"]);
    for asked in large {
        let headers = &asked.headers;
        assert_eq!((&headers.authorization, &headers.referer), (&None, &None));
    }
    // A path of the hub's own is asked for as the hub is.
    let moved = own
        .iter()
        .filter(|asked| asked.path.starts_with("/api/resolve-cache/"));
    assert_eq!(moved.count(), 3, "{own:?}");
    let token = Some("Bearer hush-token");
    assert!(
        own.iter()
            .all(|asked| asked.headers.authorization.as_deref() == token),
        "{own:?}"
    );
    let is_xets = |asked: &&Asked| asked.path.contains("xet-read-token");
    assert!(!asked.iter().any(|asked| is_xets(&asked)), "{asked:?}");
}
