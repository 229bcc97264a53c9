//! What is said of processes while they run.

use super::Deployment;
use crate::up::process::{LATE, ProcessEventKind};
use crate::up::state::{RunningProcess, awaited};

impl Deployment {
    /// Shows what a process does meanwhile.
    pub(super) fn tell_progress(&self, rank: &str, kind: &ProcessEventKind) {
        match kind {
            ProcessEventKind::Loading(percent) => {
                self.spinner.say(format!("{rank} warming up   {percent} %"));
            }
            ProcessEventKind::Streamed(streamed) => {
                let words = format!("{rank} read {streamed}");
                let steps = &self.prepared.steps;
                self.spinner.suspend(|| steps.detail(&words));
            }
            _ => {}
        }
    }

    /// Reports that a process does not serve yet and says nothing.
    pub(super) fn tell_late(&self, rank: &str) {
        let log = self.prepared.directory.log(rank);
        self.spinner.suspend(|| {
            self.prepared.steps.warn(&format!(
                "{rank} starts and has said nothing for {} s: it may hang; it is waited for; its log: {}",
                LATE.as_secs(),
                log.display()
            ));
        });
    }

    /// Reports that a process has stopped reporting, or reports again.
    pub(super) fn tell_hung(&self, rank: &str, is_hung: bool) {
        let steps = &self.prepared.steps;
        self.spinner.suspend(|| match is_hung {
            true => steps.warn(&format!("{rank} says nothing: it hangs")),
            false => steps.done(&format!("{rank} serves again")),
        });
    }

    /// Reports that a process's engine has failed, or has recovered.
    pub(super) fn tell_failed(&self, rank: &str, has_failed: bool) {
        let steps = &self.prepared.steps;
        let log = self.prepared.directory.log(rank);
        self.spinner.suspend(|| match has_failed {
            true => steps.warn(&format!(
                "{rank} takes no requests: its engine has failed; its log: {}",
                log.display()
            )),
            false => steps.done(&format!("{rank} serves again")),
        });
    }
}

/// That a process is ready, and which ones are waited for.
pub(super) fn ready(rank: &str, processes: &[RunningProcess]) -> String {
    let names: Vec<&str> = awaited(processes.iter()).collect();
    match names.is_empty() {
        true => format!("{rank} is ready"),
        false => format!("{rank} is ready; waiting for {}", names.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stages_that_are_missing_are_named_and_without_them_other_ranks() {
        let processes = |missing: &[&str]| {
            let all = [
                ("gateway-0", "gateway"),
                ("decode-0", "decode"),
                ("stage-0", "stage"),
                ("stage-1", "stage"),
            ];
            let process = |(rank, role): (&str, &str)| RunningProcess {
                rank: rank.to_owned(),
                role: role.to_owned(),
                ready: !missing.contains(&rank),
                ..RunningProcess::default()
            };
            all.map(process)
        };
        for (missing, says) in [
            (
                &["decode-0", "stage-1"][..],
                "gateway-0 is ready; waiting for stage-1",
            ),
            (&["decode-0"], "gateway-0 is ready; waiting for decode-0"),
            (&[], "gateway-0 is ready"),
        ] {
            assert_eq!(ready("gateway-0", &processes(missing)), says);
        }
    }
}
