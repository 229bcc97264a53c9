//! Sending of answers: as server-sent events, one JSON object per event and `[DONE]` at the end, or whole.
//!
//! Neither waits for the client ([`crate::backlog`]): events are written as the workers yield tokens, and what the
//! client has not read waits there.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::response::Response;
use bytes::Bytes;
use futures::StreamExt;
use http::{HeaderValue, Version, header};
use serde::Serialize;
use tokio::time::sleep;
use tokio_util::task::AbortOnDropHandle;

use crate::backlog::{Backlog, Outbox};
use crate::error::ApiError;
use crate::generation::{ChoiceEvent, ChoiceStream};

/// Time between comments that keep proxies from closing a silent stream.
const KEEP_ALIVE: Duration = Duration::from_secs(15);
/// That comment.
const COMMENT: &[u8] = b":\n\n";
/// The last event of a complete answer.
const DONE: &[u8] = b"data: [DONE]\n\n";

/// Turns events into the chunks of one API.
pub(super) trait ChunkWriter: Send + 'static {
    /// The API's chunk.
    type Chunk: Serialize + Send;
    /// The chunks of one event, in order.
    fn chunks(&mut self, event: ChoiceEvent) -> Vec<Self::Chunk>;
}

/// Waits for the first event, so that a request that fails before it begins gets its status.
///
/// # Errors
/// The error that comes instead of a first event.
pub(super) async fn begun(mut events: ChoiceStream) -> Result<ChoiceStream, ApiError> {
    match events.next().await {
        Some(Ok(first)) => Ok(Box::pin(
            futures::stream::once(async { Ok(first) }).chain(events),
        )),
        Some(Err(error)) => Err(error),
        None => Err(ApiError::internal("the answer ended before it began")),
    }
}

/// Returns the response that streams `events`. An error mid-stream is an event `{"error": …}`, after which the stream
/// ends without `[DONE]`.
pub(super) fn respond(
    backlog: &Arc<Backlog>,
    version: Version,
    events: ChoiceStream,
    writer: impl ChunkWriter,
) -> Response {
    let (outbox, delivery) = backlog.open(Some(|error| event(&error.to_json())));
    let writing = tokio::spawn(write(events, writer, outbox, version));
    let mut response = Response::new(Body::new(delivery.owning(AbortOnDropHandle::new(writing))));
    let headers = response.headers_mut();
    headers.insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("text/event-stream"),
    );
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // Otherwise nginx would buffer events.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

/// Returns the response that is one JSON object.
///
/// # Errors
/// 500 if the answer cannot be serialised.
pub(super) fn whole(
    backlog: &Arc<Backlog>,
    version: Version,
    answer: &impl Serialize,
) -> Result<Response, ApiError> {
    let bytes = serde_json::to_vec(answer)
        .map_err(|_| ApiError::internal("the answer cannot be written as JSON"))?;
    let length = bytes.len();
    let mut response = Response::new(Body::new(backlog.whole(Bytes::from(bytes), version)));
    let headers = response.headers_mut();
    headers.insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("application/json"),
    );
    headers.insert(header::CONTENT_LENGTH, HeaderValue::from(length));
    Ok(response)
}

/// Writes events as they come, and watches that the client keeps reading.
async fn write(
    mut events: ChoiceStream,
    mut writer: impl ChunkWriter,
    outbox: Outbox,
    version: Version,
) {
    let mut stalled = pin!(outbox.stalled(version));
    loop {
        let next = tokio::select! {
            next = events.next() => next,
            () = sleep(KEEP_ALIVE) => {
                if outbox.is_empty() {
                    outbox.push(Bytes::from_static(COMMENT));
                }
                continue;
            }
            () = &mut stalled => return,
        };
        let is_read = match next {
            Some(Ok(event)) => send(&outbox, &mut writer, event),
            Some(Err(error)) => {
                outbox.push(self::event(&error.to_json()));
                break;
            }
            None => {
                outbox.push(Bytes::from_static(DONE));
                break;
            }
        };
        if !is_read {
            return;
        }
    }
    outbox.end();
    // The workers are free by now; the client may take its time.
    drop(events);
    stalled.await;
}

fn send(outbox: &Outbox, writer: &mut impl ChunkWriter, next: ChoiceEvent) -> bool {
    writer.chunks(next).iter().all(|chunk| {
        let text = serde_json::to_string(chunk).unwrap_or_default();
        outbox.push(event(&text))
    })
}

/// Wraps JSON text, which has no line feed, in an event.
fn event(text: &str) -> Bytes {
    Bytes::from(format!("data: {text}\n\n"))
}
