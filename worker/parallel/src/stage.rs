//! A follower of a ring: computes its windows of what it is sent, and sends the result on.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use hearth_kernels::{Backend, Span};
use hearth_model::{Model, ModelError, PANICKED};

use crate::progress::{PassPart, StageProgress};
use crate::stream::{decode, encode};
use crate::{Group, GroupError, Message, Op, Route, Tag};

/// Time between two questions whether to go on.
const CHECK_PERIOD: Duration = Duration::from_millis(200);

/// One rank of a ring that is not its head: a part of a model, with the KV of its layers.
pub struct Stage<B: Backend> {
    model: Model<B>,
    kv: B::Kv,
    progress: StageProgress,
}

/// A stage's work has ended.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StageError {
    /// The group cannot go on.
    #[error(transparent)]
    Group(#[from] GroupError),
    /// The device is lost.
    #[error("{0}")]
    Device(String),
}

impl<B: Backend> Stage<B> {
    /// A stage that computes the layers of `model`'s part, with a cache of the group's blocks.
    pub fn new(model: Model<B>, kv: B::Kv) -> Self {
        Self {
            model,
            kv,
            progress: StageProgress::default(),
        }
    }

    /// What it computes now.
    pub fn progress(&self) -> StageProgress {
        self.progress.clone()
    }

    /// Binds the device to the calling thread, which is to make all later calls.
    ///
    /// # Errors
    /// [`ModelError`] of the backend.
    pub fn bind_thread(&self) -> Result<(), ModelError> {
        Ok(self.model.backend().bind_thread()?)
    }

    /// Computes what comes, as a member of `group`, until `goes_on` returns false. All calls are made on the calling thread.
    ///
    /// # Errors
    /// [`StageError`] if the group or the device is lost, or a member sends what it should not, which loses that member. Any other
    /// failure is told to the head, and ends its pass alone.
    pub fn follow(
        &mut self,
        group: &dyn Group,
        route: &Route,
        mut goes_on: impl FnMut() -> bool,
    ) -> Result<(), StageError> {
        while goes_on() {
            let Some(message) = group.next(Op::Stream, CHECK_PERIOD)? else {
                continue;
            };
            let (from, tag) = (message.from, message.tag);
            let part = self.read(message).map_err(|why| {
                group.lose(from, &why);
                let member = group.name(from);
                GroupError::Lost { member, why }
            })?;
            let computed = catch_unwind(AssertUnwindSafe(|| self.compute(route, tag, part)));
            self.progress.end();
            match computed.unwrap_or_else(|_| Err(panicked())) {
                Ok((to, tag, bytes)) => group.send(to, tag, bytes)?,
                // The others learn of it as this rank leaves, and compute all again elsewhere.
                Err(error) if error.is_device_lost() => {
                    return Err(StageError::Device(error.to_string()));
                }
                Err(error) => {
                    tracing::error!(%error, pass = tag.pass, layer = tag.layer, "a window failed");
                    let fault = Tag {
                        op: Op::Fault,
                        ..tag
                    };
                    group.send(0, fault, error.to_string().into_bytes())?;
                }
            }
        }
        Ok(())
    }

    /// The window that a message is for, and its rows.
    ///
    /// # Errors
    /// What is wrong with the message.
    fn read(&self, message: Message) -> Result<Rows, String> {
        let tag = message.tag;
        let layer = tag.layer as usize;
        let mut windows = self.model.part().windows().iter();
        let window = windows.find(|window| window.start == layer).cloned();
        let window =
            window.ok_or_else(|| format!("it sent {tag:?}, which is not for this rank"))?;
        let (spans, values) = decode(&message.bytes, self.model.config().hidden_size)?;
        Ok(Rows {
            window,
            spans,
            values,
        })
    }

    /// Runs a window: returns who gets the result, and its message.
    fn compute(
        &mut self,
        route: &Route,
        tag: Tag,
        rows: Rows,
    ) -> Result<(usize, Tag, Vec<u8>), ModelError> {
        let Rows {
            window,
            spans,
            values,
        } = rows;
        let hidden = self.model.config().hidden_size;
        let to = route.to(window.end).ok_or_else(|| ModelError::Part {
            why: format!("nobody has layer {}", window.end),
        })?;
        let backend = Arc::clone(self.model.backend());
        let rows = values.len() / hidden;
        self.progress.begin(PassPart {
            pass: tag.pass,
            layers: window.clone(),
            rows,
        });
        let stream = backend.upload(rows, hidden, &values)?;
        // The window needs the memory.
        drop(values);
        let stream = self
            .model
            .window(window.clone(), stream, spans.clone(), &mut self.kv)?;
        let tag = Tag {
            layer: window.end as u32,
            ..tag
        };
        Ok((to, tag, encode(&spans, &backend.download(&stream)?)))
    }
}

/// What a message brings.
struct Rows {
    /// Layers that they pass through.
    window: Range<usize>,
    spans: Vec<Span>,
    /// `[rows, hidden]`.
    values: Vec<f32>,
}

/// What the head is told of a panic.
fn panicked() -> ModelError {
    ModelError::Member {
        why: PANICKED.to_owned(),
    }
}
