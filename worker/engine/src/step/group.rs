//! A model that several ranks run: what happens when another one is lost.
//!
//! The group forms anew, with the member that has returned or its successor, and every sequence is computed again from its
//! tokens: whoever waits for an answer notices nothing but the time. A rank that computes alone, too, does so meanwhile.

use std::collections::HashMap;
use std::sync::mpsc::{RecvError, RecvTimeoutError, TryRecvError};
use std::time::{Duration, Instant};

use hearth_schedule::SequenceId;

use super::{Command, StepLoop, StepWork};
use crate::{
    EngineError, Health,
    forward::{Forward, Rejoined},
    request::EngineRequest,
};

/// Time between two looks at commands while the group is not complete; more where members are slow to answer.
const JOIN_PERIOD: Duration = Duration::from_secs(1);
/// Time that lost peers have to join, while a request that comes waits for it.
const PEERS_PATIENCE: Duration = Duration::from_millis(300);
/// The same when a member has just been lost: the others are about to end their parts of a pass.
const LOSS_PATIENCE: Duration = Duration::from_secs(2);
/// Time between two attempts to have more members where some are together and nothing is to be computed.
const SHORT_PAUSE: Duration = Duration::from_secs(2);
/// Time between two attempts while there are passes to compute, or after members came that do not fit.
const BUSY_PAUSE: Duration = Duration::from_secs(10);
/// Passes in a row that fail with the peers before they are left out.
const MOST_FAULTS: u32 = 3;
/// Time for which they are.
const SHUN_PERIOD: Duration = Duration::from_secs(60);
/// Time between two looks at the group while there is nothing to compute.
const LOOK_PERIOD: Duration = Duration::from_millis(500);

/// Losses of a member in steps of one sequence, with no token between them, after which the sequence is given up: it may be what
/// ends the members.
const MOST_LOSSES: u32 = 3;
/// The same after which a rank that computes alone, too, does so for the sequence.
const MOST_LOSSES_TOGETHER: u32 = 2;

/// Members that the group has lost.
#[derive(Default)]
pub(super) struct GroupLosses {
    /// Set while the group is not complete, and nothing is computed.
    pub(super) apart: Option<Apart>,
    /// Set while it is not complete, and passes are computed by those that are left, or by this rank alone.
    peers_lost: Option<Apart>,
    /// Set while nobody else is left: this rank computes alone.
    is_alone: bool,
    /// When lost peers were asked to join, or failed in a pass, the last time.
    tried_at: Option<Instant>,
    /// Least time until they are asked again.
    join_pause: Duration,
    /// Passes in a row that failed with the peers.
    faults: u32,
    /// How often it was complete again.
    times: u32,
    /// How often a member was lost in a step of a sequence since its last token.
    pub(super) of_sequences: HashMap<SequenceId, u32>,
}

/// A group that is not complete.
pub(super) struct Apart {
    since: Instant,
    why: String,
    /// Of a member that came and computes otherwise, most recently: which one, and with what.
    unlike: Option<String>,
}

impl Apart {
    fn new(why: String) -> Self {
        Self {
            since: Instant::now(),
            why,
            unlike: None,
        }
    }
}

impl<F: Forward> StepLoop<F> {
    /// Looks whether the group is complete. If it has lost a member, no KV is left, and nothing is computed until it has
    /// formed anew. Returns whether steps can be computed.
    pub(super) fn is_together(&mut self) -> bool {
        if self.forward.computes_alone() {
            self.look_after_peers();
            return true;
        }
        if self.group.apart.is_none()
            && let Some(why) = self.forward.group_lost()
        {
            self.part(why);
        }
        let Some(apart) = &self.group.apart else {
            return true;
        };
        let (since, why) = (apart.since, apart.why.clone());
        match self.forward.rejoin(JOIN_PERIOD) {
            Ok(Rejoined::Formed) => {
                self.complete_again(since.elapsed().as_secs_f64(), &why);
                self.group.apart = None;
                self.idle = false;
                self.shared.set_health(Health::Healthy);
                self.shared.set_apart(None);
                return true;
            }
            // The right one may come as late as one that is lost.
            Ok(Rejoined::Unlike(unlike)) if since.elapsed() < self.group_patience => {
                self.tell_unlike(unlike);
                std::thread::sleep(JOIN_PERIOD);
            }
            Ok(Rejoined::Missing) if since.elapsed() < self.group_patience => {}
            Ok(Rejoined::Missing | Rejoined::Unlike(_)) => {
                let seconds = since.elapsed().as_secs();
                let unlike = self
                    .group
                    .apart
                    .as_ref()
                    .and_then(|apart| apart.unlike.as_ref());
                self.give_up_group(&match unlike {
                    Some(unlike) => format!("{why}; after {seconds} s, {unlike}"),
                    None => format!("{why}; it has not come back for {seconds} s"),
                });
            }
            Err(error) => self.give_up_group(&error),
        }
        false
    }

    /// Asks lost peers to join again now and then: passes succeed without them, with those that are left if there are any.
    fn look_after_peers(&mut self) {
        let lost = self.forward.group_lost();
        let newly_lost = lost.filter(|_| !self.group.is_alone);
        let is_new = newly_lost.is_some();
        if let Some(why) = newly_lost {
            tracing::warn!(
                why,
                "a peer is lost: prompts are read with those that are left until all are back"
            );
            self.tell_alone(&why);
            self.group.is_alone = true;
            self.group.peers_lost.get_or_insert(Apart::new(why));
        }
        if self.group.peers_lost.is_none() {
            return;
        }
        let (patience, pause) = match (is_new, self.idle, self.group.is_alone) {
            (true, _, _) => (LOSS_PATIENCE, Duration::ZERO),
            (false, false, _) => (PEERS_PATIENCE, BUSY_PAUSE),
            // A request that has come waits for it.
            (false, true, true) => (PEERS_PATIENCE, Duration::ZERO),
            (false, true, false) => (PEERS_PATIENCE, SHORT_PAUSE),
        };
        let pause = self.group.join_pause.max(pause);
        if !is_new && self.group.tried_at.is_some_and(|at| at.elapsed() < pause) {
            return;
        }
        let joined = self.forward.rejoin(patience);
        self.group.tried_at = Some(Instant::now());
        self.group.join_pause = Duration::ZERO;
        match joined {
            Ok(Rejoined::Formed) => self.read_together(),
            Ok(Rejoined::Missing) => {}
            // It may fit later: a member may be of another plan as long as a rollout lasts.
            Ok(Rejoined::Unlike(error)) | Err(error) => {
                if self.group.is_alone {
                    self.tell_alone(&error);
                }
                self.group.join_pause = BUSY_PAUSE;
            }
        }
    }

    /// Notes that a group has formed, of all or of those that are left.
    fn read_together(&mut self) {
        self.group.faults = 0;
        self.group.is_alone = false;
        let Some(short) = self.forward.group_short() else {
            if let Some(Apart { since, why, .. }) = self.group.peers_lost.take() {
                self.complete_again(since.elapsed().as_secs_f64(), &why);
            }
            return;
        };
        tracing::warn!("reads with {short}");
        self.shared
            .set_group(format!("not complete, reads with {short}"));
    }

    /// Says in the status that this rank reads prompts alone.
    fn tell_alone(&self, why: &str) {
        self.shared.set_group(format!(
            "not complete, prompts are read by this rank alone: {why}"
        ));
    }

    /// Whether peers that failed in one pass after the other are left out for a while.
    pub(super) fn shuns_peers(&self) -> bool {
        let since = self.group.tried_at.map(|at| at.elapsed());
        self.group.faults >= MOST_FAULTS && since.is_some_and(|since| since < SHUN_PERIOD)
    }

    /// Notes that a pass with the peers has succeeded: those that were left out are no longer.
    pub(super) fn computed_together(&mut self) {
        if self.group.peers_lost.is_none() && self.group.faults >= MOST_FAULTS {
            self.shared
                .set_group("complete; passes failed, and no longer do".to_owned());
        }
        self.group.faults = 0;
    }

    /// Whether a pass that failed with its peers is computed again, without the one that was lost or without all: its requests lose
    /// nothing but time.
    pub(super) fn retries(&mut self, work: &StepWork, reason: &str) -> bool {
        let was_alone = work.alone || self.group.is_alone;
        if was_alone || !self.forward.computes_alone() || self.forward.device_lost().is_some() {
            return false;
        }
        self.idle = false;
        if self.forward.group_lost().is_some() {
            let losses = work.sequences.iter().map(|sequence| {
                let losses = self.group.of_sequences.entry(*sequence).or_insert(0);
                *losses += 1;
                *losses
            });
            // It may be what ends them.
            if losses.max() < Some(MOST_LOSSES_TOGETHER) {
                tracing::warn!(reason, "a pass has lost a peer, and is computed again");
                return true;
            }
        } else {
            self.group.faults += 1;
            self.group.tried_at = Some(Instant::now());
            if self.group.faults >= MOST_FAULTS {
                self.tell_alone(reason);
            }
        }
        tracing::warn!(
            reason,
            "a pass failed with the peers, and is computed alone"
        );
        for sequence in &work.sequences {
            if let Some(EngineRequest::Export(export)) = self.requests.get_mut(sequence) {
                export.alone = true;
            }
        }
        true
    }

    /// Records that the group was complete again, `seconds` after the loss of a member.
    fn complete_again(&mut self, seconds: f64, why: &str) {
        tracing::info!(seconds, "the group is complete again");
        self.group.times += 1;
        let times = match self.group.times {
            1 => "once".to_owned(),
            losses => format!("{losses} times"),
        };
        self.shared.set_group(format!(
            "complete; members were lost {times}, and it was complete again {seconds:.1} s after: {why}"
        ));
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
            let losses = self.group.of_sequences.entry(*sequence).or_insert(0);
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
        let apart = Apart::new(why);
        self.shared.set_apart(Some(apart.since));
        self.group.apart = Some(apart);
    }

    /// Says that a member has come that computes otherwise than before.
    fn tell_unlike(&mut self, unlike: String) {
        let Some(apart) = &mut self.group.apart else {
            return;
        };
        if apart.unlike.as_ref() != Some(&unlike) {
            tracing::warn!(
                unlike,
                "the group waits for a member that computes as before"
            );
            self.shared.set_group(format!(
                "not complete, its requests wait for a member that computes as before: {unlike}"
            ));
            apart.unlike = Some(unlike);
        }
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
