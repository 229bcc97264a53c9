//! Requests for deployments without workers: each gateway of such a deployment answers a question as soon as one has arrived, so that
//! workers are started at once.

use std::collections::HashSet;
use std::time::Duration;

use futures::StreamExt;
use futures::stream::FuturesUnordered;
use hearth_controller_core::key::Key;

use super::measure::{Gateways, Measures};
use super::scrape::{client, unanswered};

/// Interval at which gateways are looked for that are not asked yet.
const EVERY: Duration = Duration::from_millis(500);
/// Time that a gateway may take to answer while nothing arrives.
const PATIENCE: Duration = Duration::from_secs(25);
/// Time after which a gateway is asked again that could not be, and one whose workers are being started.
const PAUSE: Duration = Duration::from_secs(2);

/// Asks gateways until it is dropped, and has deployments decided about for which something has arrived.
pub(crate) async fn run<G: Gateways>(measures: &Measures, gateways: &G) {
    let Ok(client) = client().inspect_err(|error| tracing::error!(%error, "no HTTP client")) else {
        return std::future::pending().await;
    };
    let ask = async |(deployment, uid, address): (Key, String, String)| {
        match unanswered(&client, &address, PATIENCE).await {
            Ok(0) => {}
            Ok(_) => {
                let asked = measures.ask_about_load(&client, (&deployment, &uid, &address));
                if asked.await.is_ok() {
                    gateways.wake(&deployment);
                }
                tokio::time::sleep(PAUSE).await;
            }
            Err(error) => {
                tracing::debug!(%deployment, address, error, "the gateway does not say what waits");
                tokio::time::sleep(PAUSE).await;
            }
        }
        uid
    };
    let mut ticks = tokio::time::interval(EVERY);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut asked: HashSet<String> = HashSet::new();
    let mut answers = FuturesUnordered::new();
    loop {
        tokio::select! {
            _ = ticks.tick() => {
                let at_zero = measures.loads.at_zero();
                if at_zero.is_empty() {
                    continue;
                }
                for gateway in gateways.of(&at_zero) {
                    if asked.insert(gateway.1.clone()) {
                        answers.push(ask(gateway));
                    }
                }
            }
            Some(uid) = answers.next() => {
                asked.remove(&uid);
            }
        }
    }
}
