//! A model whose other layers are on other ranks: what happens when one of those is lost.
//!
//! The group forms anew, with the member that has returned or its successor, and every sequence is computed again from its
//! tokens: whoever waits for an answer notices nothing but the time.

use std::sync::mpsc::{RecvError, RecvTimeoutError, TryRecvError};
use std::time::{Duration, Instant};

use super::{Command, StepLoop, StepWork};
use crate::{EngineError, Health, forward::Forward};

/// Time between two looks at commands while the group is not complete.
const JOIN_PERIOD: Duration = Duration::from_secs(1);
/// Time between two looks at the group while there is nothing to compute.
const LOOK_PERIOD: Duration = Duration::from_millis(500);
/// Time after which requests are told that the group does not form: another worker may answer them.
const GROUP_PATIENCE: Duration = Duration::from_secs(120);

/// Losses of a member in steps of one sequence, with no token between them, after which the sequence is given up: it may be what
/// ends the members.
const MOST_LOSSES: u32 = 3;

/// A group that is not complete.
pub(super) struct Apart {
    since: Instant,
    why: String,
}

impl<F: Forward> StepLoop<F> {
    /// Looks whether the group is complete. If it has lost a member, no KV is left, and nothing is computed until it has
    /// formed anew. Returns whether steps can be computed.
    pub(super) fn is_together(&mut self) -> bool {
        if self.apart.is_none()
            && let Some(why) = self.forward.group_lost()
        {
            self.part(why);
        }
        let Some(apart) = &self.apart else {
            return true;
        };
        let (since, why) = (apart.since, apart.why.clone());
        match self.forward.rejoin(JOIN_PERIOD) {
            Ok(true) => {
                let seconds = since.elapsed().as_secs_f64();
                tracing::info!(seconds, "the group is complete again");
                self.group_losses += 1;
                let times = match self.group_losses {
                    1 => "once".to_owned(),
                    losses => format!("{losses} times"),
                };
                self.shared.set_group(format!(
                    "complete; members were lost {times}, and it was complete again {seconds:.1} s after: {why}"
                ));
                self.apart = None;
                self.idle = false;
                self.shared.set_health(Health::Healthy);
                return true;
            }
            Ok(false) if since.elapsed() < GROUP_PATIENCE => {}
            Ok(false) => self.give_up_group(&format!(
                "{why}; it has not come back for {} s",
                since.elapsed().as_secs()
            )),
            Err(error) => self.give_up_group(&error),
        }
        false
    }

    /// Waits for a command; in a group, only as long as its members are not looked after.
    pub(super) fn wait_for_command(&self) -> Result<Command, TryRecvError> {
        if !self.forward.is_in_group() {
            let command = self.inbox.recv();
            return command.map_err(|RecvError| TryRecvError::Disconnected);
        }
        let command = self.inbox.recv_timeout(LOOK_PERIOD);
        command.map_err(|error| match error {
            RecvTimeoutError::Timeout => TryRecvError::Empty,
            RecvTimeoutError::Disconnected => TryRecvError::Disconnected,
        })
    }

    /// Counts a member's loss for the sequences that were computed meanwhile, and ends those that have seen too many.
    pub(super) fn count_loss(&mut self, work: &StepWork, why: &str) {
        for sequence in &work.sequences {
            let losses = self.losses.entry(*sequence).or_insert(0);
            *losses += 1;
            if *losses >= MOST_LOSSES {
                let reason = format!(
                    "the group was lost {losses} times while it computed this request, most recently with: {why}"
                );
                self.fail(*sequence, EngineError::Forward { reason });
            }
        }
    }

    /// Records that a member is lost.
    fn part(&mut self, why: String) {
        tracing::warn!(
            why,
            requests = self.requests.len(),
            "the group is not complete: all is computed again when it is"
        );
        self.wait_for_all();
        self.scheduler.forget_kv();
        self.shared.set_group(format!(
            "not complete, its requests are computed again when it is: {why}"
        ));
        self.shared.set_health(Health::Apart(why.clone()));
        self.apart = Some(Apart {
            since: Instant::now(),
            why,
        });
    }

    fn give_up_group(&mut self, reason: &str) {
        self.shared.set_health(Health::Unhealthy(reason.to_owned()));
        let error = EngineError::Forward {
            reason: reason.to_owned(),
        };
        self.fail_all(&error);
        // What cannot be now may be later.
        std::thread::sleep(JOIN_PERIOD);
    }
}
