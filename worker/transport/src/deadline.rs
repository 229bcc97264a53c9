//! Time limits on streams: tonic's own timeout ends with the first byte of the response.

use std::{
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use futures::{Stream, stream::BoxStream};
use tokio::time::{Instant, Sleep, sleep_until};
use tonic::{Status, metadata::MetadataMap};

/// Time remaining until the caller's deadline, from the `grpc-timeout` that [`tonic::Request::set_timeout`] sends.
pub fn remaining(metadata: &MetadataMap) -> Option<Duration> {
    let text = metadata.get("grpc-timeout")?.to_str().ok()?;
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    if digits.is_empty() || digits.len() > 8 || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    let value: u64 = digits.parse().ok()?;
    match unit {
        "H" => Some(Duration::from_secs(value * 3600)),
        "M" => Some(Duration::from_secs(value * 60)),
        "S" => Some(Duration::from_secs(value)),
        "m" => Some(Duration::from_millis(value)),
        "u" => Some(Duration::from_micros(value)),
        "n" => Some(Duration::from_nanos(value)),
        _ => None,
    }
}

/// Limits a stream: it ends with `DEADLINE_EXCEEDED` if it takes longer than `total`, and with `UNAVAILABLE` if no
/// item arrives for `idle`, since the other end hangs and the caller may try another worker. The inner stream is
/// dropped at that moment, which cancels the work behind it.
pub fn limited<T: Send + 'static>(
    stream: impl Stream<Item = Result<T, Status>> + Send + 'static,
    total: Option<Duration>,
    idle: Option<Duration>,
) -> BoxStream<'static, Result<T, Status>> {
    let now = Instant::now();
    let total_at = total.and_then(|t| now.checked_add(t));
    Box::pin(Limited {
        inner: Some(Box::pin(stream)),
        total,
        total_at,
        idle,
        timer: first(total_at, idle.and_then(|i| now.checked_add(i)))
            .map(|at| Box::pin(sleep_until(at))),
    })
}

struct Limited<T> {
    inner: Option<BoxStream<'static, Result<T, Status>>>,
    total: Option<Duration>,
    total_at: Option<Instant>,
    idle: Option<Duration>,
    timer: Option<Pin<Box<Sleep>>>,
}

impl<T> Stream for Limited<T> {
    type Item = Result<T, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        let Some(inner) = &mut this.inner else {
            return Poll::Ready(None);
        };
        if let Poll::Ready(item) = inner.as_mut().poll_next(cx) {
            if item.is_none() {
                this.inner = None;
            }
            let idle_at = this.idle.and_then(|i| Instant::now().checked_add(i));
            if let (Some(timer), Some(at)) = (&mut this.timer, first(this.total_at, idle_at)) {
                timer.as_mut().reset(at);
            }
            return Poll::Ready(item);
        }
        let Some(timer) = &mut this.timer else {
            return Poll::Pending;
        };
        if timer.as_mut().poll(cx).is_pending() {
            return Poll::Pending;
        }
        this.inner = None;
        let is_over = this.total_at.is_some_and(|at| at <= Instant::now());
        Poll::Ready(Some(Err(if is_over {
            let total = this.total.unwrap_or_default();
            Status::deadline_exceeded(format!("the call took longer than {total:?}"))
        } else {
            let idle = this.idle.unwrap_or_default();
            Status::unavailable(format!("nothing arrived for {idle:?}"))
        })))
    }
}

fn first(a: Option<Instant>, b: Option<Instant>) -> Option<Instant> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
}

#[cfg(test)]
mod tests {
    use futures::StreamExt;

    use super::*;

    #[test]
    fn the_callers_deadline_is_read_back() {
        for millis in [1u64, 1500, 90_000, 10_000_000] {
            let mut request = tonic::Request::new(());
            request.set_timeout(Duration::from_millis(millis));
            assert_eq!(
                remaining(request.metadata()),
                Some(Duration::from_millis(millis))
            );
        }
        for wrong in ["", "S", "12", "1x", "-1S", "123456789S"] {
            let mut metadata = MetadataMap::new();
            metadata.insert("grpc-timeout", wrong.parse().unwrap());
            assert_eq!(remaining(&metadata), None, "{wrong:?}");
        }
        assert_eq!(remaining(&MetadataMap::new()), None);
    }

    #[tokio::test]
    async fn a_silent_stream_ends_and_lets_go_of_its_source() {
        let (tx, rx) = tokio::sync::mpsc::channel::<Result<u32, Status>>(4);
        let stream = tokio_stream::wrappers::ReceiverStream::new(rx);
        let mut stream = limited(stream, None, Some(Duration::from_millis(400)));
        for n in 0..3 {
            tokio::time::sleep(Duration::from_millis(200)).await;
            tx.send(Ok(n)).await.unwrap();
            assert_eq!(stream.next().await.unwrap().unwrap(), n);
        }
        let status = stream.next().await.unwrap().unwrap_err();
        assert_eq!(status.code(), tonic::Code::Unavailable);
        assert!(status.message().contains("nothing arrived for 400ms"));
        assert!(tx.is_closed());
        assert!(stream.next().await.is_none());
    }

    #[tokio::test]
    async fn a_stream_ends_at_its_deadline_even_while_items_come() {
        let ticks = futures::stream::unfold(0u32, |n| async move {
            tokio::time::sleep(Duration::from_millis(40)).await;
            Some((Ok(n), n + 1))
        });
        let total = Some(Duration::from_millis(300));
        let got: Vec<_> = limited(ticks, total, Some(Duration::from_secs(60)))
            .collect()
            .await;
        let last = got.last().unwrap().as_ref().unwrap_err();
        assert!(got.len() > 1 && got.len() < 9);
        assert_eq!(last.code(), tonic::Code::DeadlineExceeded);
        assert!(last.message().contains("longer than 300ms"));
    }

    #[tokio::test]
    async fn a_stream_within_its_limits_is_unchanged() {
        let items = futures::stream::iter([Ok(1), Err(Status::aborted("x")), Ok(2)]);
        let got: Vec<_> = limited(
            items,
            Some(Duration::from_secs(9)),
            Some(Duration::from_secs(9)),
        )
        .map(|r| r.map_err(|s| s.code()))
        .collect()
        .await;
        assert_eq!(got, [Ok(1), Err(tonic::Code::Aborted), Ok(2)]);
    }
}
