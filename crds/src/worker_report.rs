//! What a worker tells its supervisor: lines of JSON on its standard output.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::format_bytes;

/// A report from a worker to its supervisor.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum WorkerReport {
    /// Weights are being mapped and warmed up.
    Loading {
        /// Progress, from 0 to 100.
        percent: u32,
    },
    /// Requests are being served.
    Ready {
        /// `host:port`.
        endpoint: String,
        /// Device and kernels.
        device: String,
    },
    /// The process is alive; sent every second.
    Alive,
    /// Prompts were computed whose experts came over the link.
    Streamed(StreamedPrompts),
    /// The engine has failed: no requests are accepted until it has recovered.
    Unhealthy,
    /// The engine has recovered.
    Healthy,
    /// New requests are no longer accepted.
    Draining {
        /// Number of choices that have not ended, from the gateway.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        choices: Option<u64>,
    },
    /// The time for finishing requests in flight is over.
    CutOff {
        /// Number of answers that had not ended.
        answers: u64,
    },
}

/// Prompts that a worker computed while their experts came over the link to its device, or the part of one so far.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct StreamedPrompts {
    /// Tokens that were computed; 0 while the prompt is read.
    pub tokens: u64,
    /// Bytes of experts that crossed the link.
    pub copied_bytes: u64,
    /// Milliseconds for which the link was busy with them.
    pub copy_ms: f64,
    /// Milliseconds for which computation waited for them.
    pub wait_ms: f64,
    /// Milliseconds from the begin of a pass to the end of its last experts, of all passes.
    pub pass_ms: f64,
}

impl WorkerReport {
    /// Reads a line; `None` for other output.
    pub fn read(line: &str) -> Option<Self> {
        serde_json::from_str(line).ok()
    }
}

impl fmt::Display for StreamedPrompts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let hidden = 1.0 - (self.wait_ms / self.copy_ms.max(f64::MIN_POSITIVE)).clamp(0.0, 1.0);
        let seconds = self.pass_ms / 1e3;
        match self.tokens {
            0 => write!(f, "a prompt, {seconds:.1} s so far: ")?,
            tokens => write!(f, "{tokens} tokens in {seconds:.1} s: ")?,
        }
        write!(
            f,
            "{} of experts at {:.1} GB/s, {:.0} % of the copies beside computation",
            format_bytes(self.copied_bytes),
            self.copied_bytes as f64 / 1e6 / self.copy_ms.max(f64::MIN_POSITIVE),
            hidden * 100.0
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_streamed_prompt_is_told_with_its_rate_and_what_hid_its_copies() {
        let line = r#"{"event":"streamed","tokens":4096,"copied_bytes":12000000000,"copy_ms":1000.0,"wait_ms":40.0,"pass_ms":1240.0}"#;
        let Some(WorkerReport::Streamed(streamed)) = WorkerReport::read(line) else {
            panic!("not a streamed prompt: {line}");
        };
        assert_eq!(
            streamed.to_string(),
            "4096 tokens in 1.2 s: 11.2 GiB of experts at 12.0 GB/s, 96 % of the copies beside computation"
        );
        let so_far = StreamedPrompts {
            tokens: 0,
            ..streamed
        };
        let words = so_far.to_string();
        assert!(
            words.starts_with("a prompt, 1.2 s so far: 11.2 GiB"),
            "{words}"
        );
    }

    #[test]
    fn reports_are_read_as_they_are_written_and_other_lines_are_none() {
        let ready = WorkerReport::Ready {
            endpoint: "127.0.0.1:1".to_owned(),
            device: "cpu".to_owned(),
        };
        let cut_off = WorkerReport::CutOff { answers: 2 };
        let draining = WorkerReport::Draining { choices: Some(1) };
        for report in [
            WorkerReport::Alive,
            WorkerReport::Unhealthy,
            ready,
            cut_off,
            draining,
        ] {
            let line = serde_json::to_string(&report).expect("a line");
            assert_eq!(WorkerReport::read(&line), Some(report), "{line}");
        }
        // Of a worker, and of a gateway of an earlier version.
        let draining = WorkerReport::read(r#"{"event":"draining"}"#);
        assert_eq!(draining, Some(WorkerReport::Draining { choices: None }));
        for line in ["", "ready", "{}", r#"{"event":"other"}"#] {
            assert_eq!(WorkerReport::read(line), None, "{line}");
        }
    }
}
