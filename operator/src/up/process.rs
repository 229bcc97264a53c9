//! One worker process: started, followed by its reports, started again when it dies.

use std::fs::{File, OpenOptions};
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context;
use rustix::process::{Pid, Signal, kill_process};
use serde::Deserialize;
use tokio::io::{AsyncBufReadExt, BufReader, Lines};
use tokio::process::{Child, ChildStdout, Command};
use tokio::sync::{mpsc, watch};

/// First pause before a process is started again; doubles up to [`MAX_PAUSE`].
const MIN_PAUSE: Duration = Duration::from_millis(100);
/// Longest pause before a process is started again.
const MAX_PAUSE: Duration = Duration::from_secs(10);
/// A process that ran as long as this starts again without pause growth.
const STABLE: Duration = Duration::from_secs(10);
/// A process that serves says so every second; one that is silent for as long hangs.
const HUNG_AFTER: Duration = Duration::from_secs(3);
/// One that is silent for as long does not come back, and is ended.
const SILENCE: Duration = Duration::from_secs(20);
/// For reading what a process that has ended wrote.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// Exit code of a worker that does not take its arguments.
const USAGE: i32 = 2;
/// How a worker begins the line that says why it ends.
const ERROR: &str = "error: ";
/// Lines of an error that are shown.
const SHOWN_LOG_LINES: usize = 6;

/// How a rank's process is started.
#[derive(Clone, Debug)]
pub(crate) struct ProcessSpec {
    /// Name of the rank.
    pub(crate) rank: String,
    /// `hearth-worker`.
    pub(crate) program: PathBuf,
    /// Its arguments.
    pub(crate) arguments: Vec<String>,
    /// Where standard error goes.
    pub(crate) log: PathBuf,
}

/// A line of a worker's standard output.
#[derive(Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
enum Report {
    Loading { percent: u32 },
    Ready {},
    Alive,
    Draining,
    CutOff { answers: u64 },
}

/// Something that happened to a process.
#[derive(Debug)]
pub(crate) struct ProcessEvent {
    /// Name of the rank.
    pub(crate) rank: String,
    /// What happened.
    pub(crate) kind: ProcessEventKind,
}

/// What happened.
#[derive(Debug)]
pub(crate) enum ProcessEventKind {
    /// It runs with this process id.
    Started(u32),
    /// It maps its weights.
    Loading(u32),
    /// It serves.
    Ready,
    /// It says nothing any more (true), or speaks again.
    Hung(bool),
    /// It ended without being asked, and is started again after the pause.
    Died {
        /// In words: `killed by signal 9`.
        how: String,
        /// The error that it wrote, if it wrote one.
        why: Option<String>,
        /// Until it is started again.
        pause: Duration,
        /// Whether it had served since its start.
        was_ready: bool,
        /// It does not take its arguments, and will not the next time.
        is_refused: bool,
    },
    /// So many answers had not ended when the time to finish them was over.
    CutOff(u64),
    /// It ended after being asked.
    Stopped,
}

/// What the supervisor wants of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wanted {
    /// Run, and run again.
    Running,
    /// Finish what is in flight, then end.
    Stopped,
    /// End now.
    Killed,
}

/// Keeps a process running until `wanted` says otherwise.
pub(crate) async fn keep(
    spec: ProcessSpec,
    events: mpsc::UnboundedSender<ProcessEvent>,
    mut wanted: watch::Receiver<Wanted>,
) {
    let tell = |kind| {
        let _ = events.send(ProcessEvent {
            rank: spec.rank.clone(),
            kind,
        });
    };
    let mut pause = MIN_PAUSE;
    loop {
        let began = Instant::now();
        let log_start = std::fs::metadata(&spec.log).map_or(0, |log| log.len());
        let End {
            how,
            was_ready,
            is_refused,
        } = match spawn(&spec) {
            Ok(child) => {
                tell(ProcessEventKind::Started(child.id().unwrap_or_default()));
                follow(child, &tell, &mut wanted).await
            }
            Err(error) => End {
                how: format!("not started: {error:#}"),
                was_ready: false,
                is_refused: false,
            },
        };
        if *wanted.borrow() != Wanted::Running {
            tell(ProcessEventKind::Stopped);
            return;
        }
        if began.elapsed() >= STABLE {
            pause = MIN_PAUSE;
        }
        tell(ProcessEventKind::Died {
            how,
            why: last_error(&spec.log, log_start),
            pause,
            was_ready,
            is_refused,
        });
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            _ = wanted.wait_for(|wanted| *wanted != Wanted::Running) => {
                tell(ProcessEventKind::Stopped);
                return;
            }
        }
        pause = (pause * 2).min(MAX_PAUSE);
    }
}

fn spawn(spec: &ProcessSpec) -> anyhow::Result<Child> {
    let log = open_log(&spec.log)?;
    Command::new(&spec.program)
        .args(&spec.arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(log)
        // Ctrl-C reaches hearth alone, which then ends the processes in the right order.
        .process_group(0)
        .kill_on_drop(true)
        .spawn()
        .with_context(|| format!("{} cannot be run", spec.program.display()))
}

fn open_log(path: &Path) -> anyhow::Result<File> {
    OpenOptions::new()
        .create(true)
        .append(true)
        .open(path)
        .with_context(|| format!("{} cannot be written", path.display()))
}

/// How a process ended.
struct End {
    /// In words.
    how: String,
    /// Whether it had served.
    was_ready: bool,
    /// See [`ProcessEventKind::Died`].
    is_refused: bool,
}

/// Follows a process to its end.
async fn follow(
    mut child: Child,
    tell: &impl Fn(ProcessEventKind),
    wanted: &mut watch::Receiver<Wanted>,
) -> End {
    let pid = child.id().and_then(|id| Pid::from_raw(id.cast_signed()));
    let mut lines = child
        .stdout
        .take()
        .map(|stdout| BufReader::new(stdout).lines());
    let mut was_ready = false;
    let (mut is_silent, mut is_ended) = (false, false);
    let mut heard = tokio::time::Instant::now();
    loop {
        let line = async {
            match lines.as_mut() {
                Some(lines) => lines.next_line().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            status = child.wait() => {
                let how = if is_ended { format!("hung for {} s and was ended", SILENCE.as_secs()) } else { describe(status.as_ref().ok()) };
                if let Some(lines) = lines {
                    let _ = tokio::time::timeout(LAST_WORDS, last_words(lines, tell)).await;
                }
                let is_refused = status.is_ok_and(|status| status.code() == Some(USAGE));
                return End { how, was_ready, is_refused };
            }
            () = tokio::time::sleep_until(heard + HUNG_AFTER), if was_ready && !is_silent => {
                is_silent = true;
                tell(ProcessEventKind::Hung(true));
            }
            () = tokio::time::sleep_until(heard + SILENCE), if was_ready && !is_ended => {
                is_ended = true;
                if let Some(pid) = pid {
                    let _ = kill_process(pid, Signal::KILL);
                }
            }
            line = line => match line {
                Ok(Some(line)) => match serde_json::from_str(&line) {
                    Ok(Report::Alive) => {
                        heard = tokio::time::Instant::now();
                        if std::mem::take(&mut is_silent) {
                            tell(ProcessEventKind::Hung(false));
                        }
                    }
                    Ok(Report::Ready {}) => {
                        was_ready = true;
                        heard = tokio::time::Instant::now();
                        tell(ProcessEventKind::Ready);
                    }
                    Ok(Report::CutOff { answers }) => tell(ProcessEventKind::CutOff(answers)),
                    Ok(Report::Loading { percent }) => tell(ProcessEventKind::Loading(percent)),
                    Ok(Report::Draining) | Err(_) => {}
                },
                Ok(None) | Err(_) => lines = None,
            },
            changed = wanted.changed() => {
                let signal = match (changed.is_ok(), *wanted.borrow()) {
                    (true, Wanted::Running) => continue,
                    (true, Wanted::Stopped) => Signal::TERM,
                    (false, _) | (true, Wanted::Killed) => Signal::KILL,
                };
                if let Some(pid) = pid {
                    let _ = kill_process(pid, signal);
                }
            }
        }
    }
}

/// What a process said at its end, which may not have been read yet.
async fn last_words(mut lines: Lines<BufReader<ChildStdout>>, tell: &impl Fn(ProcessEventKind)) {
    while let Ok(Some(line)) = lines.next_line().await {
        if let Ok(Report::CutOff { answers }) = serde_json::from_str(&line) {
            tell(ProcessEventKind::CutOff(answers));
        }
    }
}

fn describe(status: Option<&ExitStatus>) -> String {
    use std::os::unix::process::ExitStatusExt;
    match status {
        Some(status) => match (status.code(), status.signal()) {
            (Some(code), _) => format!("ended with exit code {code}"),
            (None, Some(signal)) => format!("killed by signal {signal}"),
            (None, None) => "ended".to_owned(),
        },
        None => "was lost".to_owned(),
    }
}

/// The last error that a process wrote behind `start` of its log, with what follows it.
fn last_error(path: &Path, start: u64) -> Option<String> {
    let bytes = std::fs::read(path).ok()?;
    let own = bytes.get(usize::try_from(start).ok()?..)?;
    let text = String::from_utf8_lossy(own);
    let lines: Vec<&str> = text.lines().collect();
    let error = lines.iter().rposition(|line| line.starts_with(ERROR))?;
    let shown: Vec<&str> = lines[error..]
        .iter()
        .take(SHOWN_LOG_LINES)
        .copied()
        .collect();
    shown.join("\n").strip_prefix(ERROR).map(str::to_owned)
}
