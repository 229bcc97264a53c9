//! The load of deployments whose pools follow it, as their gateways push it. Gateways reach neither the operator nor the API server, so
//! the operator opens a connection to each of them, over which it hears at once that something waits.

use std::collections::HashSet;
use std::time::Duration;

use futures::StreamExt;
use futures::stream::FuturesUnordered;
use hearth_controller_core::key::Key;
use tokio::time::{Instant, sleep};

use super::measure::{Gateways, Measures};
use super::scrape::Client;

/// Interval at which gateways are looked for that are not watched yet.
const EVERY: Duration = Duration::from_secs(1);
/// Time after which a gateway is asked again that does not push, or for less than that.
const AGAIN: Duration = Duration::from_secs(4);

/// Watches gateways until it is dropped, and has deployments decided about as their load asks for it.
pub(crate) async fn run<G: Gateways>(measures: &Measures, gateways: &G) {
    let client = Client::new();
    let Ok(client) = client.inspect_err(|error| tracing::error!(%error, "no HTTP client")) else {
        return std::future::pending().await;
    };
    run_with(&client, measures, gateways).await
}

async fn run_with<G: Gateways>(client: &Client, measures: &Measures, gateways: &G) {
    let follow = async |(deployment, uid, address): (Key, String, String)| {
        // Latencies and placements are taken as rarely as from one that is asked.
        let mut scraped: Option<Instant> = None;
        let take = |text: &str, scraped: &mut Option<Instant>| {
            let now = Instant::now();
            let Some(is_due) = measures.loads.learn(&deployment, &uid, text, now) else {
                return false;
            };
            let is_scraped = scraped.is_none_or(|at| now.duration_since(at) >= AGAIN);
            let has_news = is_scraped && {
                *scraped = Some(now);
                measures.learn(&deployment, &uid, text, now)
            };
            if is_due || has_news {
                gateways.wake(&deployment);
            }
            true
        };
        let began = Instant::now();
        let ended = client.watch(&address, |text| take(text, &mut scraped));
        if let Err(error) = ended.await {
            tracing::debug!(%deployment, address, error, "the gateway does not push its load");
            // One of an earlier version cannot, and one that many watch may refuse.
            if scraped.is_none()
                && let Ok(text) = client.metrics(&address).await
            {
                take(&text, &mut scraped);
            }
            if began.elapsed() < AGAIN {
                sleep(AGAIN).await;
            }
        }
        uid
    };
    let mut ticks = tokio::time::interval(EVERY);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut watched: HashSet<String> = HashSet::new();
    let mut watches = FuturesUnordered::new();
    loop {
        tokio::select! {
            _ = ticks.tick() => {
                let followed = measures.loads.followed();
                if followed.is_empty() {
                    continue;
                }
                let listed = gateways.gateways_of(&followed);
                measures.loads.list(&listed);
                for gateway in listed {
                    if watched.insert(gateway.1.clone()) {
                        watches.push(follow(gateway));
                    }
                }
            }
            Some(uid) = watches.next() => {
                watched.remove(&uid);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};
    use std::sync::Mutex;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::{TcpListener, TcpStream};

    use super::*;

    /// Gateways that are listed, and the deployments that were woken.
    struct Listed {
        gateways: Mutex<Vec<(Key, String, String)>>,
        woken: Mutex<Vec<Key>>,
    }

    impl Gateways for Listed {
        fn gateways(&self) -> Vec<(Key, String, String)> {
            self.gateways.lock().unwrap().clone()
        }
        fn gateways_of(
            &self,
            known: &BTreeMap<Key, BTreeSet<String>>,
        ) -> Vec<(Key, String, String)> {
            let mut listed = self.gateways();
            listed.retain(|(key, _, _)| known.contains_key(key));
            listed
        }
        fn in_doubt(&self) -> Vec<(Key, String, String)> {
            Vec::new()
        }
        fn wake(&self, deployment: &Key) {
            self.woken.lock().unwrap().push(deployment.clone());
        }
    }

    fn key() -> Key {
        Key::new("default", "demo")
    }

    fn text(queued: u32) -> String {
        format!("hearth_requests_queued {queued}\nhearth_choices_unanswered {queued}\n# EOF\n")
    }

    /// Accepts a connection, and answers with this head, and more as it goes on; returns what was asked for.
    async fn answer(listener: &TcpListener, head: &str) -> (TcpStream, String) {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut request = vec![0; 2048];
        let read = stream.read(&mut request).await.unwrap();
        let path = String::from_utf8_lossy(&request[..read]).into_owned();
        let path = path.split(' ').nth(1).unwrap().to_owned();
        stream.write_all(head.as_bytes()).await.unwrap();
        (stream, path)
    }

    async fn until(is_so: impl Fn() -> bool) {
        let waits = async {
            while !is_so() {
                sleep(Duration::from_millis(10)).await;
            }
        };
        let in_time = tokio::time::timeout(Duration::from_secs(20), waits).await;
        in_time.expect("it becomes so in time");
    }

    const OPEN: &str = "HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n";
    const MISSING: &str =
        "HTTP/1.1 404 Not Found\r\nconnection: close\r\ncontent-length: 0\r\n\r\n";

    /// A gateway that pushes and one of an earlier version: both are heard, the first again after its watch has ended, and neither once it
    /// is not listed.
    #[tokio::test]
    async fn gateways_are_watched_or_scraped_and_watched_again() {
        let new = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = new.local_addr().unwrap().port();
        let old = TcpListener::bind(("127.0.0.2", port)).await.unwrap();
        let measures = Measures::default();
        measures.loads.follow(&key(), true);
        let gateway = |uid: &str, address: &str| (key(), uid.to_owned(), address.to_owned());
        let listed = Listed {
            gateways: Mutex::new(vec![
                gateway("new", "127.0.0.1"),
                gateway("old", "127.0.0.2"),
            ]),
            woken: Mutex::default(),
        };
        let client = Client::with_port(port).unwrap();
        let queued = || Some(measures.loads.demand(&key(), Instant::now())?.queued);
        let story = async {
            let (mut stream, path) = answer(&new, OPEN).await;
            assert_eq!(path, "/metrics/watch");
            let (_, path) = answer(&old, MISSING).await;
            assert_eq!(path, "/metrics/watch");
            let (mut scraped, path) = answer(&old, OPEN).await;
            assert_eq!(path, "/metrics");
            scraped.write_all(text(2).as_bytes()).await.unwrap();
            drop(scraped);
            stream.write_all(text(3).as_bytes()).await.unwrap();
            until(|| queued() == Some(5.0)).await;
            assert_eq!(
                *listed.woken.lock().unwrap(),
                [key()],
                "at once, and not for each"
            );
            drop(stream);
            let (mut stream, path) = answer(&new, OPEN).await;
            assert_eq!(path, "/metrics/watch");
            stream.write_all(text(0).as_bytes()).await.unwrap();
            until(|| queued() == Some(2.0)).await;
            listed.gateways.lock().unwrap().remove(0);
            sleep(2 * EVERY).await;
            stream.write_all(text(9).as_bytes()).await.unwrap();
            let closed = stream.read(&mut [0; 1]).await;
            assert!(
                matches!(closed, Ok(0) | Err(_)),
                "it is not watched any more"
            );
            assert_eq!(queued(), Some(2.0));
        };
        tokio::select! {
            () = run_with(&client, &measures, &listed) => unreachable!("it ends when it is dropped"),
            () = story => {}
        }
    }
}
