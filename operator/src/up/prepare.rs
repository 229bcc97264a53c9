//! Preparation before the first process: reads files and measures, and changes nothing but the state directory.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::File;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, bail};
use hearth_crds::{
    GpuProfile, InferenceDeployment, InferencePlanSpec, ModelFacts, NodeProfileStatus, PlanRole,
    Strategy, Target,
};
use hearth_planner::{CpuOffer, GpuOffer, PlanInput};
use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::boxes::{self, BoxArg};
use super::{MachineArgs, UpArgs, files, profiles};
use crate::environment::Environment;
use crate::terminal::ui::Steps;
use crate::terminal::{table, ui};
use crate::up::interrupts::{Interrupts, Stopped};
use crate::up::ports::FreePorts;
use crate::up::state::{DeploymentDir, StateDir};
use crate::up::{ports, source, worker};

/// A plan with addresses, ready to execute.
pub(crate) struct Prepared {
    /// The plan, with every decision.
    pub(crate) plan: InferencePlanSpec,
    /// Directory of the plan, the logs and the list of processes.
    pub(crate) directory: DeploymentDir,
    /// Lock held as long as this deployment runs.
    pub(crate) lock: File,
    /// Address of the OpenAI endpoint.
    pub(crate) listen: SocketAddr,
    /// Address of the metrics.
    pub(crate) metrics: SocketAddr,
    /// Whether the model has a chat template.
    pub(crate) can_chat: bool,
    /// Start time of `hearth up`.
    pub(crate) started: Instant,
    /// Progress shown to the user.
    pub(crate) steps: Steps,
    /// Who gets SIGTERM and Ctrl-C until the processes run.
    pub(crate) interrupts: Interrupts,
    /// The deployment.
    deployment: InferenceDeployment,
    /// What the plan was made from, and the next one will be.
    found: Found,
    /// GPUs that no longer answer, by UUID, with what was said about them: no plan uses them.
    pub(crate) lost_gpus: BTreeMap<String, String>,
}

impl Prepared {
    /// Writes the plan to disk and shows it.
    ///
    /// # Errors
    /// The state directory cannot be written.
    pub(super) fn announce(&self) -> anyhow::Result<()> {
        self.directory.write_plan(&self.plan)?;
        self.steps.done(&format!(
            "plan {}: {}",
            self.plan.generation,
            table::headline(&self.plan)
        ));
        let is_ring = self.plan.ranks_of(PlanRole::Stage).next().is_some();
        if self.deployment.spec.strategy == Strategy::PipedRing
            && !is_ring
            && let Some(why) = self.plan.why.first()
        {
            self.steps.detail(why);
        }
        for line in table::ranks(&self.plan).lines() {
            self.steps.detail(line);
        }
        Ok(())
    }
}

/// Result of the steps up to the plan, shared by `hearth up` and `hearth plan`.
pub(crate) struct Planned {
    /// Name of the deployment.
    pub(crate) name: String,
    /// The plan, with every decision but without addresses.
    pub(crate) plan: InferencePlanSpec,
    /// Whether the model has a chat template.
    can_chat: bool,
}

/// What was found of the model and the machine, before anything ran on it.
struct Found {
    /// The model's files.
    directory: PathBuf,
    inspected: Inspected,
    /// One for each node that the machine stands for.
    profiles: Vec<NodeProfileStatus>,
    /// These nodes as the command says them; empty if it says none.
    boxes: Vec<BoxArg>,
}

/// The worker's answer to `facts --serving`.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Inspected {
    #[serde(flatten)]
    facts: ModelFacts,
    chat_template: bool,
}

/// The worker's tools: what they do is shown, and SIGTERM and Ctrl-C end them.
struct Tools<'a> {
    environment: &'a Environment,
    steps: &'a Steps,
    interrupts: Interrupts,
}

impl<'a> Tools<'a> {
    /// Begins to listen for the signals.
    fn new(environment: &'a Environment, steps: &'a Steps) -> anyhow::Result<Self> {
        Ok(Self {
            environment,
            steps,
            interrupts: Interrupts::listen()?,
        })
    }

    /// The directory of a deployment's model.
    fn dereference(&self, deployment: &InferenceDeployment) -> anyhow::Result<PathBuf> {
        let source = &deployment.spec.model.source;
        source::dereference(source, self.environment, self.steps, &self.interrupts)
    }

    /// Asks a tool; `what` says what it does.
    fn ask<T: DeserializeOwned>(&self, what: &str, arguments: &[&OsStr]) -> anyhow::Result<T> {
        let mut busy = self.steps.busy(what);
        let hear = |part: &str| busy.say(format!("{what}: {part}"));
        let answer = worker::ask(self.environment, &self.interrupts, arguments, hear);
        busy.finish();
        answer.map_err(|error| match error.is::<Stopped>() {
            true => Stopped(format!("stopped while {what}")).into(),
            false => error,
        })
    }
}

/// Dereferences, validates and plans.
///
/// # Errors
/// Any problem with the file, the model or the machine, by field.
pub(crate) fn plan(
    file: &Path,
    state: &StateDir,
    machine: &MachineArgs,
    environment: &Environment,
    steps: &Steps,
) -> anyhow::Result<Planned> {
    let deployment = deployment(file, Target::Machine)?;
    let tools = Tools::new(environment, steps)?;
    let found = find(&deployment, state, machine, &tools)?;
    let name = deployment.metadata.name.as_deref().unwrap_or_default();
    found.plan(&deployment, state.deployment(name).next_generation())
}

/// The same for nodes of a cluster, whose profiles are in files. The model's files are read here.
///
/// # Errors
/// Those of [`plan`], and of the profiles.
pub(crate) fn plan_for_nodes(
    file: &Path,
    profiles: &[PathBuf],
    environment: &Environment,
    steps: &Steps,
) -> anyhow::Result<Planned> {
    let all = profiles.iter().map(PathBuf::as_path).chain([file]);
    if all.filter(|file| *file == Path::new("-")).count() > 1 {
        bail!(
            "two of --file and --profiles are -, and standard input can be read once\n  write one of them to a file"
        );
    }
    let deployment = deployment(file, Target::Cluster)?;
    hearth_planner::check_spec(&deployment.spec)?;
    say_valid(&deployment, steps);
    if !deployment.spec.placement.node_selector.is_empty() {
        steps.warn(
            "spec.placement.nodeSelector is not applied: profiles do not have the nodes' labels. Leave out those of nodes that it excludes",
        );
    }
    let profiles = profiles::read(profiles)?;
    let tools = Tools::new(environment, steps)?;
    let directory = tools.dereference(&deployment)?;
    let found = Found {
        inspected: inspect(&deployment, &directory, &tools)?,
        directory,
        profiles,
        boxes: Vec::new(),
    };
    let gpus = found.profiles.iter();
    let gpus = gpus.map(|node| (node.node.clone(), node.gpus.len() as u32));
    let offer = GpuOffer::Cluster {
        plugin: &gpus.collect(),
        claimable: &BTreeMap::new(),
    };
    planned(&deployment, &found, offer, 1)
}

/// Plans what runs again, without the GPUs that are lost. The plan has no addresses. Streams wait for it: nothing is measured again,
/// which would take seconds on a busy machine and find the memory of what still runs in use.
///
/// # Errors
/// Those of [`plan`].
pub(crate) fn plan_again(prepared: &mut Prepared) -> anyhow::Result<InferencePlanSpec> {
    let profiles = prepared.found.profiles.iter_mut();
    for gpu in profiles.flat_map(|profile| &mut profile.gpus) {
        if let Some(why) = prepared.lost_gpus.get(&gpu.uuid) {
            gpu.obstacle = Some(format!("it is lost: {why}"));
        }
    }
    let generation = prepared.directory.next_generation();
    Ok(prepared.found.plan(&prepared.deployment, generation)?.plan)
}

/// Reads and validates the deployment in a file.
fn deployment(file: &Path, target: Target) -> anyhow::Result<InferenceDeployment> {
    let text = read(file, "name an InferenceDeployment's file with -f")?;
    let text = text.trim_start_matches('\u{feff}');
    Ok(hearth_crds::parse_deployment_for(text, target)?)
}

/// Finds out what a plan needs to know.
fn find(
    deployment: &InferenceDeployment,
    state: &StateDir,
    machine: &MachineArgs,
    tools: &Tools<'_>,
) -> anyhow::Result<Found> {
    hearth_planner::check_spec(&deployment.spec)?;
    boxes::check(&machine.nodes, machine.virtual_device.as_deref())?;
    say_valid(deployment, tools.steps);
    let directory = tools.dereference(deployment)?;
    let inspected = inspect(deployment, &directory, tools)?;
    // Measuring takes seconds on a busy machine.
    hearth_planner::check_model(&deployment.spec, &inspected.facts)?;
    let profile = measure(&directory, state, machine, tools)?;
    Ok(Found {
        inspected,
        directory,
        profiles: boxes::split(profile, &machine.nodes)?,
        boxes: machine.nodes.clone(),
    })
}

impl Found {
    /// Plans for this machine.
    fn plan(&self, deployment: &InferenceDeployment, generation: u64) -> anyhow::Result<Planned> {
        planned(deployment, self, GpuOffer::Machine, generation)
    }
}

fn say_valid(deployment: &InferenceDeployment, steps: &Steps) {
    let name = deployment.metadata.name.as_deref().unwrap_or_default();
    steps.done_with(
        &format!("{name} is valid"),
        "hearth.dev/v1alpha1 InferenceDeployment",
    );
}

/// Reads what a plan needs to know of the model.
fn inspect(
    deployment: &InferenceDeployment,
    directory: &Path,
    tools: &Tools<'_>,
) -> anyhow::Result<Inspected> {
    let facts = ["facts", "--serving", "--json", "--model"].map(OsStr::new);
    let inspected: Inspected = tools.ask(
        "reading the model's headers and its tokenizer",
        &[&facts[..], &[directory.as_os_str()]].concat(),
    )?;
    let model_name = deployment.spec.model.source.default_name();
    let text = format!("model {}", model(&inspected.facts, &model_name));
    tools.steps.done(&text);
    Ok(inspected)
}

/// The plan of a deployment over nodes.
fn planned(
    deployment: &InferenceDeployment,
    found: &Found,
    gpus: GpuOffer<'_>,
    generation: u64,
) -> anyhow::Result<Planned> {
    let name = deployment.metadata.name.clone().unwrap_or_default();
    let namespace = deployment.metadata.namespace.as_deref();
    let plan = hearth_planner::plan(&PlanInput {
        name: &name,
        namespace: namespace.unwrap_or("default"),
        generation,
        spec: &deployment.spec,
        facts: &found.inspected.facts,
        model_path: &found.directory.display().to_string(),
        profiles: &found.profiles,
        gpus,
        cpus: CpuOffer::Machine,
    });
    let plan = plan.map_err(|error| boxes::as_arguments(error, &found.boxes, &found.profiles))?;
    Ok(Planned {
        name,
        plan,
        can_chat: found.inspected.chat_template,
    })
}

/// Profiles this machine, using the rates kept from an idle moment if there are any.
fn measure(
    model: &Path,
    state: &StateDir,
    args: &MachineArgs,
    tools: &Tools<'_>,
) -> anyhow::Result<NodeProfileStatus> {
    let started = jiff::Timestamp::now();
    let kept = state.profile();
    let parent = std::process::id().to_string();
    let mut arguments = ["profile", "--json", "--progress", "--with-parent", &parent]
        .map(OsStr::new)
        .to_vec();
    arguments.extend([OsStr::new("--keep"), kept.as_os_str()]);
    arguments.extend(args.measure.then_some(OsStr::new("--anew")));
    if let Some(device) = &args.virtual_device {
        arguments.extend([OsStr::new("--virtual-device"), OsStr::new(device)]);
    }
    arguments.extend([OsStr::new("--disk"), model.as_os_str()]);
    let profile: NodeProfileStatus = tools.ask("measuring this machine", &arguments)?;
    let measured: Option<jiff::Timestamp> = profile.measured_at.parse().ok();
    let when = measured
        .filter(|at| at.as_second() < started.as_second())
        .map_or_else(String::new, |at| format!(" (measured {at})"));
    let text = format!("this machine: {}{when}", machine(&profile));
    tools.steps.done(&text);
    if let Some(percent) = profile.busy_percent {
        tools.steps.warn(&format!(
            "other programs had {percent} % of the CPUs meanwhile: predictions are pessimistic, and the next start measures again"
        ));
    }
    Ok(profile)
}

/// Reads the text of a file, or of standard input for `-`.
pub(super) fn read(file: &Path, remedy: &str) -> anyhow::Result<String> {
    let text = match file.to_str() {
        Some("-") => std::io::read_to_string(std::io::stdin()),
        _ => std::fs::read_to_string(file),
    };
    text.with_context(|| {
        let name = match file.to_str() {
            Some("-") => "standard input".to_owned(),
            _ => file.display().to_string(),
        };
        format!("{name} cannot be read\n  {remedy}")
    })
}

/// Does all of the above, then assigns addresses.
///
/// # Errors
/// Those of [`plan`]; a port in use; a deployment that already runs.
pub(crate) fn prepare(args: &UpArgs, environment: &Environment) -> anyhow::Result<Prepared> {
    let started = Instant::now();
    let steps = Steps::new(environment);
    let state = StateDir::locate(args.state.state_dir.as_deref(), environment)?;
    let mut free = FreePorts::default();
    let deployment = deployment(&args.file, Target::Machine)?;
    // Before its port: a running deployment also holds the port, and another port would not help.
    let name = deployment.metadata.name.as_deref().unwrap_or_default();
    state.deployment(name).check_free(name)?;
    let listen = match args.port {
        // Chosen by the system, but here: a restarted gateway keeps it, and it is reported to others.
        0 => free.take(args.host)?,
        port => {
            let address = SocketAddr::new(args.host, port);
            ports::check_free(address, &args.file.display().to_string(), "--port ")?;
            address
        }
    };
    if args.metrics.port() != 0 {
        let flag = format!("--metrics {}:", args.metrics.ip());
        ports::check_free(args.metrics, &args.file.display().to_string(), &flag)?;
    }
    files::check(args)?;
    let tools = Tools::new(environment, &steps)?;
    let found = find(&deployment, &state, &args.machine, &tools)?;
    let interrupts = tools.interrupts;
    let directory = state.deployment(name);
    let Planned {
        name,
        mut plan,
        can_chat,
    } = found.plan(&deployment, directory.next_generation())?;
    if args.ask.is_some() && !can_chat {
        bail!(
            "--ask needs a chat template, and the model of {name} has none\n  \
             leave --ask out, and send texts to /v1/completions"
        );
    }
    let lock = directory.acquire(&name)?;

    for rank in &mut plan.ranks {
        let endpoint = match rank.role {
            PlanRole::Gateway => listen,
            PlanRole::Prefill | PlanRole::Decode | PlanRole::Stage => {
                free.take(Ipv4Addr::LOCALHOST.into())?
            }
        };
        rank.endpoint = Some(endpoint.to_string());
    }
    let metrics = match args.metrics.port() {
        0 => free.take(args.metrics.ip())?,
        _ => args.metrics,
    };
    Ok(Prepared {
        plan,
        directory,
        lock,
        listen,
        metrics,
        can_chat,
        started,
        steps,
        interrupts,
        deployment,
        found,
        lost_gpus: BTreeMap::new(),
    })
}

fn machine(profile: &NodeProfileStatus) -> String {
    let mut features = Vec::new();
    let isa = &profile.isa;
    for (has, name) in [
        (isa.avx512bf16, "bf16"),
        (isa.avx512vnni, "vnni"),
        (isa.avx512vbmi, "vbmi"),
        (isa.amx, "amx"),
    ] {
        if has {
            features.push(name);
        }
    }
    let vectors = match (isa.avx512f, isa.avx2, isa.neon) {
        (true, _, _) => " AVX-512",
        (_, true, _) => " AVX2",
        (_, _, true) => " NEON",
        _ => "",
    };
    let features = if features.is_empty() {
        String::new()
    } else {
        format!(" ({})", features.join(", "))
    };
    let numa = profile.numa_nodes.len();
    let gpus = match profile.gpus.as_slice() {
        [] => "no GPU".to_owned(),
        gpus => gpus.iter().map(gpu).collect::<Vec<_>>().join(", "),
    };
    format!(
        "{} cores{vectors}{features}, {numa} NUMA node{}, {}, {gpus}, reads {:.1} GB/s",
        profile.cpus.len(),
        if numa == 1 { "" } else { "s" },
        ui::bytes(profile.memory.total_bytes),
        profile.memory.read_all_threads_gbps,
    )
}

fn gpu(gpu: &GpuProfile) -> String {
    match gpu.memory_bytes {
        0 => format!("{} (memory not known)", gpu.name),
        memory_bytes => format!("{} ({})", gpu.name, ui::bytes(memory_bytes)),
    }
}

fn model(facts: &ModelFacts, name: &str) -> String {
    format!(
        "{name}: {}, {}, {}, {}, mapped once",
        facts.architecture,
        parameters(facts.parameter_count),
        facts.dtype,
        ui::bytes(facts.bytes.total())
    )
}

fn parameters(count: u64) -> String {
    match count {
        0..1_000_000 => format!("{:.1} K parameters", count as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} M parameters", count as f64 / 1e6),
        _ => format!("{:.1} B parameters", count as f64 / 1e9),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_names_its_gpus_with_their_memory() {
        let gpu = |name: &str, gib: u64| GpuProfile {
            name: name.to_owned(),
            memory_bytes: gib << 30,
            ..GpuProfile::default()
        };
        let mut profile = NodeProfileStatus::default();
        assert!(machine(&profile).contains(", no GPU, "));
        profile.gpus = vec![gpu("NVIDIA GeForce RTX 4090", 24), gpu("NVIDIA L4", 0)];
        let text = machine(&profile);
        let names = ", NVIDIA GeForce RTX 4090 (24 GiB), NVIDIA L4 (memory not known), ";
        assert!(text.contains(names), "{text}");
    }
}
