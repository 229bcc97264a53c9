//! The end: the gateway first, so that its streams still reach their workers; then the workers, which have nothing to lose any more.

use std::collections::BTreeSet;
use std::time::Duration;

use hearth_crds::{END_MARGIN, PlanRole};
use tokio::time::{Instant, sleep_until};

use super::Deployment;
use crate::signals::ShutdownSignals;
use crate::up::process::Wanted;
use crate::up::state::RunningProcess;

/// Time in which a process that goes on says that it ends.
const ANSWER: Duration = Duration::from_secs(2);

/// Time after which whoever has not ended is named.
const TOLD_AFTER: Duration = Duration::from_secs(1);

/// How a wait for processes to end went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Waited {
    /// All have ended.
    Ended,
    /// Some have not ended in time.
    Late,
    /// The user wants no more of it.
    Interrupted,
}

impl Deployment {
    /// Stops all processes. What hangs is waited for only as long as answers are in flight, `grace` at most.
    pub(super) async fn stop(mut self, grace: Duration, signals: &mut ShutdownSignals) {
        self.spinner.finish();
        self.draining.clear();
        if self.running.ready {
            self.prepared.steps.done(&format!(
                "draining: streams in flight get {} s to finish; Ctrl-C again stops now",
                grace.as_secs()
            ));
        }
        let gateway = self.stop_gateway(grace, signals).await;
        let mut waited = gateway;
        for role in [PlanRole::Decode, PlanRole::Stage, PlanRole::Prefill] {
            if waited != Waited::Interrupted {
                waited = self.stop_workers(role, signals).await;
            }
        }
        // Also one that is about to be started again.
        let all: Vec<String> = self.wanted.keys().cloned().collect();
        self.want(&all, Wanted::Killed);
        while self.tasks.join_next().await.is_some() {}
        self.prepared.directory.clear_running();
        let _ = self.prepared.lock.unlock();
        let told = last_line(gateway, self.open_choices, self.cut_off, grace);
        self.prepared.steps.done(&told);
    }

    /// Stops the gateway, which ends with its last answer, or a moment after `grace`.
    async fn stop_gateway(&mut self, grace: Duration, signals: &mut ShutdownSignals) -> Waited {
        let ranks = self.names(PlanRole::Gateway, |_| true);
        let has_served = |process: &RunningProcess| process.ready || process.hung;
        let has_clients = !self.names(PlanRole::Gateway, has_served).is_empty();
        self.open_choices = (!has_clients).then_some(0);
        let limit = match has_clients {
            true => grace + END_MARGIN,
            false => ANSWER,
        };
        self.want(&ranks, Wanted::Stopped);
        self.until_ended(&ranks, limit, Some(Instant::now() + grace), signals)
            .await
    }

    /// Stops the workers of a role once the gateway has ended: what hangs or does not serve is killed at once, and what does not
    /// answer, soon.
    async fn stop_workers(&mut self, role: PlanRole, signals: &mut ShutdownSignals) -> Waited {
        let ranks = self.names(role, |_| true);
        self.want(&self.names(role, |process| process.ready), Wanted::Stopped);
        self.want(&self.names(role, |process| !process.ready), Wanted::Killed);
        let mut waited = self.until_ended(&ranks, TOLD_AFTER, None, signals).await;
        if waited == Waited::Late {
            let told = unended(&self.running.processes, &ranks, &self.draining);
            self.prepared.steps.warn(&told);
            let left = ANSWER - TOLD_AFTER;
            waited = self.until_ended(&ranks, left, None, signals).await;
        }
        if waited != Waited::Late {
            return waited;
        }
        let is_deaf = |rank: &&String| !self.draining.contains(*rank);
        let deaf: Vec<String> = ranks.iter().filter(is_deaf).cloned().collect();
        self.want(&deaf, Wanted::Killed);
        self.until_ended(&ranks, END_MARGIN, None, signals).await
    }

    /// Follows all processes until those of `ranks` have ended, for `limit` at most. Where answers are finished meanwhile, until
    /// `grace_ends`, it says whom they wait for.
    async fn until_ended(
        &mut self,
        ranks: &[String],
        limit: Duration,
        grace_ends: Option<Instant>,
        signals: &mut ShutdownSignals,
    ) -> Waited {
        let until = Instant::now() + limit;
        let mut told = String::new();
        loop {
            let mut processes = self.running.processes.iter();
            if !processes.any(|it| ranks.contains(&it.rank) && it.pid.is_some()) {
                return Waited::Ended;
            }
            if let Some(grace_ends) = grace_ends {
                self.tell_waited(&mut told, grace_ends);
            }
            tokio::select! {
                event = self.events.recv() => match event {
                    // That one cannot be started is no news any more.
                    Some(event) => { let _ = self.take(event); }
                    None => return Waited::Ended,
                },
                () = sleep_until(until) => return Waited::Late,
                () = signals.wait() => return Waited::Interrupted,
            }
        }
    }

    /// Says whom answers in flight may wait for, and for how long at most, whenever that is another one than was `told`.
    fn tell_waited(&self, told: &mut String, grace_ends: Instant) {
        let missing = missing(&self.running.processes, self.open_choices);
        if missing != *told && !missing.is_empty() {
            let left = grace_ends.saturating_duration_since(Instant::now());
            self.prepared.steps.warn(&format!(
                "draining waits for {missing}: {:.0} s at most",
                left.as_secs_f64().ceil()
            ));
        }
        *told = missing;
    }

    /// Names of the processes of a role that are as asked for.
    fn names(&self, role: PlanRole, is_meant: impl Fn(&RunningProcess) -> bool) -> Vec<String> {
        let processes = self.running.processes.iter();
        let meant = processes.filter(|it| it.role == role.as_str() && is_meant(it));
        meant.map(|it| it.rank.clone()).collect()
    }
}

/// Whom answers in flight may wait for, each with what is wrong; empty if for nobody. `open_choices` is what the gateway has said.
fn missing(processes: &[RunningProcess], open_choices: Option<u64>) -> String {
    let wrong = processes.iter().filter_map(|it| {
        let is_gateway = it.role == PlanRole::Gateway.as_str();
        match (it.hung, open_choices) {
            (true, Some(1..)) => Some(format!("{}, which hangs", it.rank)),
            (true, None) if is_gateway => Some(format!("{}, which hangs", it.rank)),
            (false, Some(1..)) if !it.ready && !is_gateway => {
                Some(format!("{}, which is not ready", it.rank))
            }
            _ => None,
        }
    });
    wrong.collect::<Vec<_>>().join(", and ")
}

/// Which of `ranks` have not ended [`TOLD_AFTER`] they were told to, who hangs meanwhile, and how long that may take. Those that
/// are `draining` have said that they end.
fn unended(processes: &[RunningProcess], ranks: &[String], draining: &BTreeSet<String>) -> String {
    let alive = || processes.iter().filter(|it| it.pid.is_some());
    let ends = |it: &RunningProcess| draining.contains(&it.rank) && !it.hung;
    let awaited = alive().filter_map(|it| match (it.hung, ranks.contains(&it.rank)) {
        (true, _) => Some(format!("{}, which hangs", it.rank)),
        (false, true) if ends(it) => Some(format!("{}, which ends", it.rank)),
        (false, true) => Some(format!("{}, which does not answer", it.rank)),
        (false, false) => None,
    });
    let awaited: Vec<String> = awaited.collect();
    let limit = match alive().any(|it| ranks.contains(&it.rank) && ends(it)) {
        true => ANSWER + END_MARGIN,
        false => ANSWER,
    };
    format!(
        "stopping waits for {}: {} s at most",
        awaited.join(", and "),
        (limit - TOLD_AFTER).as_secs()
    )
}

/// What is said at last. `open_choices` is what the gateway had when it was told to end; `None`: it did not say.
fn last_line(gateway: Waited, open_choices: Option<u64>, cut_off: u64, grace: Duration) -> String {
    let seconds = grace.as_secs();
    match (gateway, open_choices, cut_off) {
        (Waited::Ended, Some(_), 0) | (Waited::Late | Waited::Interrupted, Some(0), 0) => {
            "stopped".to_owned()
        }
        // It hung, and was ended.
        (Waited::Ended, None, 0) => "stopped: what may have been in flight was cut off".to_owned(),
        (Waited::Ended, _, 1) => {
            format!("stopped; 1 answer was cut off: it had not ended after {seconds} s (--grace)")
        }
        (Waited::Ended, _, count) => format!(
            "stopped; {count} answers were cut off: they had not ended after {seconds} s (--grace)"
        ),
        (Waited::Interrupted, Some(_), _) => {
            "stopped at once: what was in flight was cut off".to_owned()
        }
        (Waited::Interrupted, None, _) => {
            "stopped at once: what may have been in flight was cut off".to_owned()
        }
        (Waited::Late, ..) => format!(
            "stopped: the gateway had not ended after {seconds} s (--grace), and what may have been in flight was cut off"
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process(rank: &str, role: PlanRole, ready: bool, hung: bool) -> RunningProcess {
        RunningProcess {
            rank: rank.to_owned(),
            role: role.as_str().to_owned(),
            pid: Some(1),
            ready,
            hung,
            ..RunningProcess::default()
        }
    }

    #[test]
    fn who_is_waited_for_is_named_while_something_is_in_flight() {
        let hung = [
            process("gateway-0", PlanRole::Gateway, true, false),
            process("decode-0", PlanRole::Decode, false, false),
            process("stage-0", PlanRole::Stage, false, true),
        ];
        let both = "decode-0, which is not ready, and stage-0, which hangs";
        for (open, told) in [(None, ""), (Some(0), ""), (Some(2), both)] {
            assert_eq!(missing(&hung, open), told, "{open:?}");
        }
        // What it has in flight is not known.
        let gateway = [process("gateway-0", PlanRole::Gateway, false, true)];
        assert_eq!(missing(&gateway, None), "gateway-0, which hangs");
    }

    #[test]
    fn whoever_does_not_end_is_named_with_the_time_that_it_may_take() {
        let [head, mut stage] = [("decode-0", PlanRole::Decode), ("stage-0", PlanRole::Stage)]
            .map(|(rank, role)| process(rank, role, true, false));
        let told = |processes: &[RunningProcess], rank: &str, draining: &[&str]| {
            let draining = draining.iter().map(|rank| (*rank).to_owned()).collect();
            unended(processes, &[rank.to_owned()], &draining)
        };
        assert_eq!(
            told(&[head.clone(), stage.clone()], "stage-0", &["decode-0"]),
            "stopping waits for stage-0, which does not answer: 1 s at most"
        );
        stage.hung = true;
        assert_eq!(
            told(&[head, stage], "decode-0", &["decode-0"]),
            "stopping waits for decode-0, which ends, and stage-0, which hangs: 5 s at most"
        );
    }

    #[test]
    fn what_was_cut_off_is_said_only_where_something_was() {
        let line = |gateway, open, cut| last_line(gateway, open, cut, Duration::from_secs(30));
        for gateway in [Waited::Ended, Waited::Late, Waited::Interrupted] {
            assert_eq!(line(gateway, Some(0), 0), "stopped");
        }
        assert_eq!(line(Waited::Ended, Some(3), 0), "stopped");
        let cut = line(Waited::Ended, Some(3), 2);
        assert!(cut.starts_with("stopped; 2 answers were cut off"), "{cut}");
        // A request that came behind what it said.
        let cut = line(Waited::Ended, Some(0), 1);
        assert!(cut.starts_with("stopped; 1 answer was cut off"), "{cut}");
        let cut = line(Waited::Interrupted, Some(3), 0);
        assert_eq!(cut, "stopped at once: what was in flight was cut off");
        for gateway in [Waited::Ended, Waited::Late, Waited::Interrupted] {
            let unknown = line(gateway, None, 0);
            assert!(unknown.contains("may have been in flight"), "{unknown}");
        }
    }
}
