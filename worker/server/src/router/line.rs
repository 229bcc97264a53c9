//! The order in which requests that waited in the queue come to a worker.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use futures::future::{BoxFuture, ready};
use tokio::sync::{Mutex, OwnedMutexGuard};
use tokio::task::unconstrained;
use tokio::time::sleep;

/// Requests on their way from the queue to one worker. Two calls at once could arrive in another order; a worker that is
/// slow to accept them delays those alone that are on their way to it.
#[derive(Default)]
pub(super) struct Line(Arc<Mutex<()>>);

impl Line {
    /// Takes the last place.
    pub(super) fn enter(&self) -> Turn {
        // The mutex is fair, and counts from the first poll on, which no budget of the task's may put off.
        let mut place = unconstrained(self.0.clone().lock_owned()).boxed();
        let first = (&mut place).now_or_never();
        Turn(Some(first.map_or(place, |first| ready(first).boxed())))
    }
}

/// The turn of a request to be sent to its worker. One that did not wait in the queue is sent at once.
#[derive(Default)]
pub struct Turn(Option<BoxFuture<'static, OwnedMutexGuard<()>>>);

impl Turn {
    /// Makes `call` when the turn has come. Those behind wait until it has returned, or for `limit`.
    pub async fn take<T>(self, limit: Duration, call: impl Future<Output = T>) -> T {
        let Some(place) = self.0 else {
            return call.await;
        };
        let first = place.await;
        tokio::select! {
            biased;
            answer = call => answer,
            never = pass_on(first, limit) => match never {},
        }
    }
}

/// Lets the next one in the line go after `limit`, unless it is dropped before.
async fn pass_on(first: OwnedMutexGuard<()>, limit: Duration) -> Infallible {
    sleep(limit).await;
    drop(first);
    std::future::pending().await
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use tokio::time::{Instant, timeout};

    use super::*;

    const LIMIT: Duration = Duration::from_millis(200);

    #[tokio::test(start_paused = true)]
    async fn those_in_a_line_go_one_after_the_other_and_one_that_leaves_it_delays_nobody() {
        let line = Line::default();
        let [first, second, third, fourth] = [(); 4].map(|()| line.enter());
        let free = Turn::default().take(LIMIT, async { 0 });
        assert_eq!(free.now_or_never(), Some(0), "it is in no line");
        drop(second);
        let mut third = Box::pin(third.take(LIMIT, async { 3 }));
        assert_eq!((&mut third).now_or_never(), None, "the first is not sent");
        assert_eq!(fourth.take(LIMIT, async { 4 }).now_or_never(), None);
        assert_eq!(first.take(LIMIT, async { 1 }).await, 1);
        assert_eq!(third.now_or_never(), Some(3));
        assert_eq!(line.enter().take(LIMIT, async { 5 }).await, 5);
    }

    #[tokio::test(start_paused = true)]
    async fn a_call_that_is_not_accepted_delays_those_behind_it_for_the_limit() {
        for limit in [Duration::ZERO, LIMIT] {
            let line = Line::default();
            let (first, second) = (line.enter(), line.enter());
            let began = Instant::now();
            let hung = timeout(3 * LIMIT, first.take(limit, pending::<()>()));
            let next = second.take(limit, async { began.elapsed() });
            let (hung, waited) = tokio::join!(hung, next);
            assert!(hung.is_err());
            let slack = Duration::from_millis(2);
            assert!((limit..=limit + slack).contains(&waited), "{waited:?}");
        }
    }
}
