//! Steps in flight: their start, one on top of the other where the device queues them, and their landing in order.
//!
//! A step on top of another is started before the tokens of that one are known to the host. It may turn out that an answer
//! has ended with such a token, or that nobody wants it any more: the row that was computed for it is discarded with its
//! keys, and its blocks are given to nobody while a step that writes to them is in flight.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    time::Instant,
};

use hearth_kernels::trace::{TraceEvent, TraceLane};
use hearth_schedule::Step;

use super::{StepLoop, panic_text};
use crate::{
    export::ExportQueue,
    forward::{Forward, Output, Started},
    watch::StepWatch,
    work::StepWork,
};

/// A step that was started.
pub(super) struct FlyingStep {
    number: u64,
    work: StepWork,
    started_at: Instant,
    /// What became of it at its start, or why it could not be started.
    started: Result<Started, String>,
    /// KV that it sends and has not sent yet.
    exports: ExportQueue,
}

impl<F: Forward> StepLoop<F> {
    /// Starts a step that knows all its tokens.
    pub(super) fn start(&mut self, step: &Step) {
        let (mut work, refused) =
            StepWork::new(step, &mut self.requests, self.forward.can_sample());
        work.alone |= self.shuns_peers();
        refused
            .into_iter()
            .for_each(|(s, error)| self.fail(s, error));
        // Otherwise all have been cancelled since.
        if !work.batch.tokens.is_empty() {
            self.launch(step.number, work);
        }
    }

    /// Starts a step on top of those in flight, if there is one that waits for nothing that the host must know or do first.
    pub(super) fn start_ahead(&mut self) -> bool {
        let pending = self.in_flight.len();
        let Some(last) = self.in_flight.back() else {
            return false;
        };
        if pending >= self.max_in_flight.min(self.forward.depth())
            || last.started != Ok(Started::Running)
            || !self.imports.is_empty()
            || !last.work.leads_on(&self.requests)
        {
            return false;
        }
        let Some(step) = self.scheduler.schedule_ahead() else {
            return false;
        };
        let work = StepWork::ahead(&step, &last.work, pending, &self.requests);
        self.launch(step.number, work);
        true
    }

    fn launch(&mut self, number: u64, work: StepWork) {
        let started_at = Instant::now();
        let mut watch = StepWatch {
            work: &work,
            requests: &mut self.requests,
            layout: &self.layout,
            is_finished_if_wanted: self.whole_prompts,
            exports: ExportQueue::default(),
            shared: &self.shared,
            started_at,
            streamed_before_ns: self.shared.stats().streamed.pass_ns,
        };
        let forward = &mut self.forward;
        let started = catch_unwind(AssertUnwindSafe(|| forward.start(&work, &mut watch)));
        let exports = watch.exports;
        self.in_flight.push_back(FlyingStep {
            number,
            work,
            started_at,
            started: started.unwrap_or_else(|panic| Err(panic_text(&*panic))),
            exports,
        });
    }

    /// Waits for the first step in flight, and distributes its tokens and logits. If it fails, so do those on top of it.
    pub(super) fn land(&mut self) {
        let Some(step) = self.in_flight.pop_front() else {
            return;
        };
        let FlyingStep {
            number,
            work,
            started_at,
            started,
            mut exports,
        } = step;
        let outcome = match started {
            Ok(Started::Running) => {
                let sent = catch_unwind(AssertUnwindSafe(|| self.send_all(&mut exports)));
                match (sent, self.wait()) {
                    (Ok(()), outcome) => outcome,
                    (Err(panic), _) => Err(panic_text(&*panic)),
                }
            }
            Ok(Started::GivenUp) => Ok(None),
            Err(reason) => Err(reason),
        };
        self.counters.kv_bytes_moved += exports.sent_bytes;
        // While another step was in flight, this one waited for it.
        let began = started_at.max(self.landed_at);
        self.landed_at = Instant::now();
        self.counters.step_time += self.landed_at - began;
        if let Some(trace) = self.trace.as_ref().filter(|trace| trace.is_on()) {
            trace.record(TraceEvent {
                lane: TraceLane::Host,
                name: work.describe().into(),
                begin_ns: trace.ns_at(began),
                end_ns: trace.ns_at(self.landed_at),
            });
        }
        let has_lost = !exports.lost.is_empty();
        let checked = match outcome {
            Ok(None) => {
                if has_lost {
                    self.note_lost_device();
                }
                return self.give_up(&work);
            }
            Ok(Some(output)) => work.checked(output, self.forward.vocab()),
            Err(reason) => Err(reason),
        };
        self.counters.steps += 1;
        match checked {
            Ok(output) => {
                self.succeeded();
                if !work.alone {
                    self.computed_together();
                }
                if has_lost {
                    self.note_lost_device();
                }
                let lost = exports.lost.into_iter();
                lost.for_each(|(s, error)| self.fail(s, error));
                self.deliver(number, &work, output);
            }
            Err(reason) => {
                // Everyone in a step on top of this one is in this one, too.
                self.wait_for_all();
                if self.retries(&work, &reason) {
                    return;
                }
                let lost = self.forward.group_lost();
                match lost.filter(|_| !self.forward.computes_alone()) {
                    // It computes all of it again.
                    Some(why) => self.count_loss(&work, &why),
                    None => self.failed(&work, reason),
                }
            }
        }
    }

    /// Sends all KV of a step, each piece as soon as it has arrived: the device goes on meanwhile, since all is launched.
    fn send_all(&mut self, exports: &mut ExportQueue) {
        if exports.is_empty() {
            return;
        }
        // A device that hangs is seen here.
        let pass = self.forward.progress().begin();
        while exports.send_next(&mut self.requests) {
            pass.goes_on();
        }
    }

    /// Waits until the device computes no step any more, and discards what it has computed.
    pub(super) fn wait_for_all(&mut self) {
        for step in std::mem::take(&mut self.in_flight) {
            if step.started == Ok(Started::Running) {
                // Its requests end for another reason.
                let _ = self.wait();
            }
        }
    }

    fn wait(&mut self) -> Result<Option<Output>, String> {
        let forward = &mut self.forward;
        let outcome = catch_unwind(AssertUnwindSafe(|| forward.wait()));
        outcome
            .unwrap_or_else(|panic| Err(panic_text(&*panic)))
            .map(Some)
    }
}
