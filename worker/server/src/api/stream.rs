//! Server-sent events: one JSON object an event, `[DONE]` at the end.

use std::convert::Infallible;
use std::time::Duration;

use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures::{Stream, StreamExt};
use http::HeaderValue;
use serde::Serialize;

use crate::error::ApiError;
use crate::generation::{ChoiceEvent, ChoiceStream};

/// Between comments that keep proxies from closing a silent stream.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

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
/// That of a first event which is one.
pub(super) async fn begun(mut events: ChoiceStream) -> Result<ChoiceStream, ApiError> {
    match events.next().await {
        Some(Ok(first)) => Ok(Box::pin(
            futures::stream::once(async { Ok(first) }).chain(events),
        )),
        Some(Err(error)) => Err(error),
        None => Err(ApiError::internal("the answer ended before it began")),
    }
}

/// The response that streams `events`. An error in mid-stream is an event `{"error": …}`, behind which the stream ends
/// without `[DONE]`.
pub(super) fn respond(events: ChoiceStream, writer: impl ChunkWriter) -> Response {
    let stream = sse(events, writer);
    let keep_alive = KeepAlive::new().interval(KEEP_ALIVE);
    let mut response = Sse::new(stream).keep_alive(keep_alive).into_response();
    // nginx would hold events back otherwise.
    response
        .headers_mut()
        .insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

fn sse(
    mut events: ChoiceStream,
    mut writer: impl ChunkWriter,
) -> impl Stream<Item = Result<Event, Infallible>> + Send {
    async_stream::stream! {
        while let Some(event) = events.next().await {
            match event {
                Ok(event) => {
                    for chunk in writer.chunks(event) {
                        yield Ok(Event::default().data(serde_json::to_string(&chunk).unwrap_or_default()));
                    }
                }
                Err(error) => {
                    yield Ok(Event::default().data(error.to_json()));
                    return;
                }
            }
        }
        yield Ok(Event::default().data("[DONE]"));
    }
}
