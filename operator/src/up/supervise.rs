//! Executes a plan: one process per rank, reported as they become ready, restarted when they die, stopped in order.

mod reach;
mod replan;
mod stop;
mod tell;

use std::collections::{BTreeMap, BTreeSet};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::bail;
use hearth_crds::{MAX_FAILED_STARTS, PlanRank, PlanRole};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

use self::replan::LostDevice;
use self::tell::ready;
use super::hint::Hint;
use super::prepare::Prepared;
use super::process::{self, ProcessEvent, ProcessEventKind, ProcessSpec, Wanted};
use super::{UpArgs, ask};
use crate::environment::Environment;
use crate::signals::ShutdownSignals;
use crate::terminal::ui::Busy;
use crate::up::state::{Running, RunningProcess, StateDir};
use crate::up::{fetched, worker};

/// Runs the plan's processes until Ctrl-C, or until the answer with `--once`.
pub(super) async fn supervise(
    args: &UpArgs,
    prepared: Prepared,
    environment: &Environment,
) -> anyhow::Result<ExitCode> {
    // First of all: what is said and written from here on is also cleared away.
    let mut signals = ShutdownSignals::new()?;
    prepared.interrupts.leave();
    prepared.announce()?;
    let model = PathBuf::from(&prepared.plan.model.path);
    // While a worker is started again, too, nothing removes the model.
    let hold = fetched::hold(&model);
    let mut deployment = Deployment::start(args, prepared, environment)?;
    let outcome = tokio::select! {
        outcome = deployment.serve(args, environment) => outcome,
        () = signals.wait() => Ok(ExitCode::SUCCESS),
    };
    deployment
        .stop(Duration::from_secs(u64::from(args.grace)), &mut signals)
        .await;
    drop(hold);
    fetched::note_use(&model, environment);
    outcome
}

struct Deployment {
    prepared: Prepared,
    running: Running,
    /// Weak, so that the events end with the last process.
    sender: mpsc::WeakUnboundedSender<ProcessEvent>,
    events: mpsc::UnboundedReceiver<ProcessEvent>,
    wanted: BTreeMap<String, watch::Sender<Wanted>>,
    tasks: JoinSet<()>,
    /// Deaths of each process since it last served.
    failed_starts: BTreeMap<String, u32>,
    /// The last reported reason of death, by process.
    reasons: BTreeMap<String, String>,
    /// A device that a worker has found lost, until there is a plan without it.
    lost: Option<LostDevice>,
    /// Processes that have said that they end, since all were told to.
    draining: BTreeSet<String>,
    /// Number of choices that had not ended when the gateway said so.
    open_choices: Option<u64>,
    /// Number of answers that the gateway did not finish in time.
    cut_off: u64,
    spinner: Busy,
}

impl Deployment {
    fn start(args: &UpArgs, prepared: Prepared, environment: &Environment) -> anyhow::Result<Self> {
        let (sender, events) = mpsc::unbounded_channel();
        let running = describe(args, &prepared);
        let spinner = prepared.steps.busy("starting the workers");
        let mut deployment = Self {
            prepared,
            running,
            sender: sender.downgrade(),
            events,
            wanted: BTreeMap::new(),
            tasks: JoinSet::new(),
            failed_starts: BTreeMap::new(),
            reasons: BTreeMap::new(),
            lost: None,
            draining: BTreeSet::new(),
            open_choices: None,
            cut_off: 0,
            spinner,
        };
        let ranks = deployment.prepared.plan.ranks.iter();
        let ranks: Vec<String> = ranks.map(|rank| rank.name.clone()).collect();
        for rank in &ranks {
            deployment.keep(args, environment, rank)?;
        }
        deployment.publish();
        Ok(deployment)
    }

    /// Starts the process of a rank, and again whenever it ends.
    fn keep(&mut self, args: &UpArgs, environment: &Environment, name: &str) -> anyhow::Result<()> {
        let mut ranks = self.prepared.plan.ranks.iter();
        let Some(rank) = ranks.find(|rank| rank.name == name) else {
            return Ok(());
        };
        let spec = ProcessSpec {
            rank: rank.name.clone(),
            program: worker::program(environment)?,
            arguments: arguments(args, rank, &self.prepared),
            log: self.prepared.directory.log(&rank.name),
        };
        let Some(sender) = self.sender.upgrade() else {
            bail!("all processes ended")
        };
        let (want, receiver) = watch::channel(Wanted::Running);
        self.wanted.insert(rank.name.clone(), want);
        self.tasks.spawn(process::keep(spec, sender, receiver));
        Ok(())
    }

    /// Follows the processes; returns only with `--once` or if a process does not start.
    async fn serve(
        &mut self,
        args: &UpArgs,
        environment: &Environment,
    ) -> anyhow::Result<ExitCode> {
        while !self.running.processes.iter().all(|process| process.ready) {
            self.follow_one(args, environment).await?;
        }
        self.until_reached(args, environment).await?;
        self.announce(args, environment);
        if let Some(question) = &args.ask {
            let key = args.api_keys.as_deref().and_then(ask::first_key);
            let running = self.running.clone();
            let mut asking = std::pin::pin!(ask::ask(&running, question, key.as_deref()));
            let answered = loop {
                tokio::select! {
                    answered = &mut asking => break answered,
                    event = self.events.recv() => self.handle(event, args, environment).await?,
                }
            };
            if args.once {
                return answered.map(|()| ExitCode::SUCCESS);
            }
            answered?;
            self.prepared
                .steps
                .detail("the endpoint stays up; Ctrl-C stops it");
        }
        self.follow(args, environment).await?;
        Ok(ExitCode::SUCCESS)
    }

    /// Waits until the gateway reaches all workers, so that the first prompt is read where the plan says.
    async fn until_reached(
        &mut self,
        args: &UpArgs,
        environment: &Environment,
    ) -> anyhow::Result<()> {
        let running = self.running.clone();
        let mut reaching = std::pin::pin!(reach::all(&running));
        let reached = loop {
            tokio::select! {
                reached = &mut reaching => break reached,
                event = self.events.recv() => self.handle(event, args, environment).await?,
            }
        };
        if let Err(reached) = reached {
            let text = format!("the gateway reaches {reached}");
            let steps = &self.prepared.steps;
            self.spinner.suspend(|| steps.warn(&text));
        }
        Ok(())
    }

    /// Follows the processes for good.
    async fn follow(&mut self, args: &UpArgs, environment: &Environment) -> anyhow::Result<()> {
        loop {
            self.follow_one(args, environment).await?;
        }
    }

    async fn follow_one(&mut self, args: &UpArgs, environment: &Environment) -> anyhow::Result<()> {
        let event = self.events.recv().await;
        self.handle(event, args, environment).await
    }

    /// Takes an event, and plans again if it tells of a lost device; without one, all processes have ended.
    async fn handle(
        &mut self,
        event: Option<ProcessEvent>,
        args: &UpArgs,
        environment: &Environment,
    ) -> anyhow::Result<()> {
        let Some(event) = event else {
            bail!("all processes ended")
        };
        self.take(event)?;
        match self.lost.take() {
            Some(lost) => self.plan_without(args, environment, &lost).await,
            None => Ok(()),
        }
    }

    fn take(&mut self, event: ProcessEvent) -> anyhow::Result<()> {
        let ProcessEvent { rank, kind } = event;
        let mut processes = self.running.processes.iter_mut();
        let Some(process) = processes.find(|process| process.rank == rank) else {
            return Ok(());
        };
        let had_died = process.restarts > 0;
        match kind {
            ProcessEventKind::Started(pid) => process.pid = Some(pid),
            ProcessEventKind::Loading(_) | ProcessEventKind::Streamed(_) => {
                self.tell_progress(&rank, &kind);
                return Ok(());
            }
            ProcessEventKind::Late(is_late) => {
                process.silent = is_late;
                if is_late {
                    self.tell_late(&rank);
                }
            }
            ProcessEventKind::Ready => {
                process.ready = true;
                self.failed_starts.remove(&rank);
                let text = ready(&rank, &self.running.processes);
                self.spinner.say(text);
                if had_died && self.running.ready {
                    self.prepared.steps.done(&format!("{rank} serves again"));
                }
            }
            ProcessEventKind::Hung(is_hung) => {
                process.hung = is_hung;
                process.ready = !is_hung;
                self.tell_hung(&rank, is_hung);
            }
            ProcessEventKind::Unhealthy(has_failed) => {
                process.ready = !has_failed;
                process.failed = has_failed;
                self.tell_failed(&rank, has_failed);
            }
            ProcessEventKind::Died {
                how,
                why,
                pause,
                was_ready,
                is_refused,
                is_lost,
            } => {
                process.end();
                process.restarts += 1;
                if is_refused {
                    self.failed_starts.insert(rank.clone(), MAX_FAILED_STARTS);
                }
                // A device that was lost while it served may be back for the next process.
                if is_lost && !was_ready {
                    let why = why.unwrap_or(how);
                    self.lost = Some(LostDevice { rank, why });
                } else {
                    self.died(&rank, &how, why, pause, was_ready)?;
                }
            }
            ProcessEventKind::Draining(choices) => {
                self.open_choices = choices.or(self.open_choices);
                self.draining.insert(rank);
            }
            ProcessEventKind::CutOff(answers) => self.cut_off += answers,
            ProcessEventKind::Stopped => {
                process.end();
                process.ended = true;
            }
        }
        self.publish();
        Ok(())
    }

    /// Reports a death; a repeated reason only once.
    fn died(
        &mut self,
        rank: &str,
        how: &str,
        why: Option<String>,
        pause: Duration,
        was_ready: bool,
    ) -> anyhow::Result<()> {
        let log = self.prepared.directory.log(rank);
        let failures = self.failed_starts.entry(rank.to_owned()).or_default();
        *failures += u32::from(!was_ready);
        if *failures >= MAX_FAILED_STARTS && !self.running.ready {
            self.spinner.finish();
            let why = why.unwrap_or_else(|| format!("{rank} {how}"));
            bail!(
                "{rank} does not start: {why}\n  its whole log: {}",
                log.display()
            );
        }
        let is_new = why.is_some() && self.reasons.get(rank) != why.as_ref();
        self.spinner.suspend(|| {
            let steps = &self.prepared.steps;
            steps.warn(&format!(
                "{rank} {how}; started again in {:.1} s",
                pause.as_secs_f64()
            ));
            if let Some(why) = why.as_ref().filter(|_| is_new) {
                why.lines().for_each(|line| steps.detail(line));
                steps.detail(&format!("its whole log: {}", log.display()));
            }
        });
        if let Some(why) = why {
            self.reasons.insert(rank.to_owned(), why);
        }
        Ok(())
    }

    fn announce(&mut self, args: &UpArgs, environment: &Environment) {
        self.spinner.finish();
        self.running.ready = true;
        self.publish();
        let Running {
            endpoint,
            metrics,
            served_name,
            certificate,
            ..
        } = &self.running;
        let steps = &self.prepared.steps;
        steps.done(&format!(
            "ready in {:.1} s",
            self.prepared.started.elapsed().as_secs_f64()
        ));
        steps.detail(&format!(
            "OpenAI endpoint   {endpoint}      model \"{served_name}\""
        ));
        if let Some(metrics) = metrics {
            steps.detail(&format!("metrics           {metrics}"));
        }
        let header = match args.api_keys {
            Some(_) => "-H 'Authorization: Bearer KEY' ",
            None => "",
        };
        let trust = certificate.as_ref().map_or_else(String::new, |file| {
            format!("--cacert '{}' ", file.display())
        });
        let curl = |route: &str, input: &str| {
            format!(
                "  curl {trust}{endpoint}/{route} {header}-H 'Content-Type: application/json' \
                 -d '{{\"model\": \"{served_name}\", {input}}}'"
            )
        };
        if self.prepared.can_chat {
            let chat = self.chat_line(args, environment);
            steps.detail(&format!("try               {chat}      or"));
            steps.detail(&curl(
                "chat/completions",
                "\"messages\": [{\"role\": \"user\", \"content\": \"What is Hearth?\"}]",
            ));
        } else {
            steps.detail("the model has no chat template, so it completes texts; try");
            steps.detail(&curl("completions", "\"prompt\": \"Hearth is\""));
        }
        steps.detail(&format!(
            "Ctrl-C stops; streams in flight get {} s to finish.",
            args.grace
        ));
    }

    /// Returns the command for talking to it from another terminal.
    fn chat_line(&self, args: &UpArgs, environment: &Environment) -> String {
        let name = self.running.name.as_str();
        let state = StateDir::locate(args.state.state_dir.as_deref(), environment);
        let others = state.as_ref().ok().and_then(|state| state.running().ok());
        let runs_alone = others.is_none_or(|all| all.iter().all(|one| one.name == name));
        let asked = args.state.state_dir.as_deref();
        let state_dir = asked
            .filter(|directory| !directory.as_os_str().is_empty())
            .map(|directory| {
                directory
                    .canonicalize()
                    .unwrap_or_else(|_| directory.to_owned())
            });
        let program = std::env::current_exe().and_then(|program| program.canonicalize());
        Hint {
            program: program.ok(),
            found: environment
                .program("hearth")
                .and_then(|program| program.canonicalize().ok()),
            name: (!runs_alone).then_some(name),
            state_dir: state_dir.as_deref(),
            has_keys: args.api_keys.is_some(),
        }
        .line()
    }

    fn want(&self, ranks: &[String], wanted: Wanted) {
        for rank in ranks {
            if let Some(sender) = self.wanted.get(rank) {
                sender.send_replace(wanted);
            }
        }
    }

    /// Publishes the state to other commands; a full disk must not stop running processes.
    fn publish(&self) {
        if let Err(error) = self.prepared.directory.write_running(&self.running) {
            self.prepared
                .steps
                .warn(&format!("hearth status will not see this: {error:#}"));
        }
    }
}

fn arguments(args: &UpArgs, rank: &PlanRank, prepared: &Prepared) -> Vec<String> {
    let plan = prepared.directory.plan_file();
    let mut arguments = vec![
        rank.role.as_str().to_owned(),
        "--plan".to_owned(),
        plan.display().to_string(),
        "--rank".to_owned(),
        rank.name.clone(),
        "--grace".to_owned(),
        args.grace.to_string(),
        "--with-parent".to_owned(),
        std::process::id().to_string(),
    ];
    if let Some(directory) = &args.tls_dir {
        arguments.extend(["--tls-dir".to_owned(), directory.display().to_string()]);
    }
    if rank.role == PlanRole::Gateway {
        arguments.extend(["--metrics".to_owned(), prepared.metrics.to_string()]);
        for (flag, file) in [
            ("--api-keys", &args.api_keys),
            ("--https-cert", &args.https_cert),
            ("--https-key", &args.https_key),
        ] {
            if let Some(file) = file {
                arguments.extend([flag.to_owned(), file.display().to_string()]);
            }
        }
        for (flag, seconds) in [
            ("--keep-alive", args.keep_alive),
            ("--client-stall", args.client_stall),
        ] {
            if let Some(seconds) = seconds {
                arguments.extend([flag.to_owned(), seconds.to_string()]);
            }
        }
        for origin in &args.cors_origins {
            arguments.extend(["--cors-origin".to_owned(), origin.clone()]);
        }
    }
    arguments
}

fn describe(args: &UpArgs, prepared: &Prepared) -> Running {
    let scheme = if args.https_cert.is_some() {
        "https"
    } else {
        "http"
    };
    let absolute = |file: &PathBuf| file.canonicalize().unwrap_or_else(|_| file.clone());
    let process = |rank: &PlanRank| RunningProcess {
        rank: rank.name.clone(),
        role: rank.role.as_str().to_owned(),
        ..RunningProcess::default()
    };
    Running {
        name: prepared.plan.deployment.name.clone(),
        pid: std::process::id(),
        endpoint: format!("{scheme}://{}/v1", reached(prepared.listen)),
        metrics: Some(format!("http://{}/metrics", reached(prepared.metrics))),
        certificate: args.https_cert.as_ref().map(absolute),
        tls_dir: args.tls_dir.as_ref().map(absolute),
        served_name: prepared.plan.model.served_name.clone(),
        file: absolute(&args.file),
        plan_generation: prepared.plan.generation,
        started_at: jiff::Timestamp::now().to_string(),
        ready: false,
        processes: prepared.plan.ranks.iter().map(process).collect(),
    }
}

/// Address at which this machine can reach it.
fn reached(address: SocketAddr) -> SocketAddr {
    let ip = match address.ip() {
        ip if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        ip => ip,
    };
    SocketAddr::new(ip, address.port())
}
