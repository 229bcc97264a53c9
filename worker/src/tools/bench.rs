//! `hearth-worker bench`: prefill and decode rates compared with the memory's bandwidth, in one run.

use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;
use hearth_crds::GpuProfile;
use hearth_kernels::Backend;
use hearth_kernels::trace::Trace;
use hearth_model::ExpertShare;
use serde::Serialize;
use sha2::{Digest, Sha256};

use super::ahead::{self, AheadReport};
use super::lanes::{Clock, LaneReport, LaneReports};
use super::peers::{self, ExpertsArg};
use super::session::{Session, argmax};
use super::virtual_device::measured;
use crate::cli::{ModelArgs, ResidencyArg};
use crate::device::{DeviceOptions, HostOptions, OnDevice, on_device};
use crate::environment::Environment;
use crate::load::{self, LoadOptions, LoadedOn};
use crate::logging::print_data;
use crate::trace_file;

/// Bytes read by the bandwidth probe: far more than any cache holds.
const PROBE_BYTES: usize = 1 << 30;
/// Prompt tokens per step, unless a step costs the way of the experts.
const CHUNK_TOKENS: usize = 512;
/// Decode steps before timing starts.
const WARMUP_STEPS: usize = 2;

/// Arguments of `bench`.
#[derive(Args)]
pub(crate) struct BenchArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// Prompt tokens
    #[arg(long, default_value = "512", value_parser = clap::value_parser!(u32).range(1..))]
    prefill: u32,
    /// Times that the first prompt is read, of which the last counts: what a device does once is not in it then
    #[arg(long, default_value = "1", value_parser = clap::value_parser!(u32).range(1..))]
    prompts: u32,
    /// Decode steps
    #[arg(long, default_value = "64", value_parser = clap::value_parser!(u32).range(1..))]
    decode: u32,
    /// Sequences that are decoded together
    #[arg(long, default_value = "1", value_parser = clap::value_parser!(u32).range(1..=512))]
    batch: u32,
    /// Prompt tokens per step [default: 512, or the whole prompt where its experts are streamed]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    chunk: Option<u32>,
    /// Ranks that read prompts together, each with such a device: threads of this process that have a share of the rows and of each
    /// layer's experts
    #[arg(long, default_value = "1", value_parser = clap::value_parser!(u32).range(1..=64))]
    peers: u32,
    /// How rows come to the experts of other peers
    #[arg(long, value_enum, default_value = "small-ep", requires = "peers")]
    experts: ExpertsArg,
    /// Where to write what the lanes of a GPU or a virtual device did, for chrome://tracing or ui.perfetto.dev
    #[arg(long, value_name = "FILE.json")]
    trace: Option<PathBuf>,
    /// Measure the rates of a modelled device, and of what models the experts beside it, as a profile does (needs --json)
    #[arg(long, requires = "json")]
    rates: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

impl BenchArgs {
    /// Number of sequences, and tokens of each.
    fn sequences(&self) -> (usize, usize) {
        let tokens = self.prefill as usize + self.decode as usize + WARMUP_STEPS + 1;
        (self.batch as usize, tokens)
    }
}

/// Results of one benchmark. Times are medians for decode, wall time for prefill; of a modelled device, they are its own.
#[derive(Serialize)]
struct Report {
    model: String,
    device: String,
    kv_dtype: String,
    batch: u32,
    /// Ranks that have read the prompts together.
    peers: u32,
    prefill_tokens: u32,
    prefill_ms: f64,
    prefill_tokens_per_s: f64,
    /// When the prompt and the timed steps began, in milliseconds since 1970: runs side by side are compared by it.
    prefill_began_unix_ms: f64,
    decode_began_unix_ms: f64,
    decode_steps: u32,
    decode_step_ms: f64,
    /// Of each timed step, in order.
    decode_steps_ms: Vec<f64>,
    decode_tokens_per_s: f64,
    /// Bytes of weights read by one decode step.
    weight_bytes_per_step: u64,
    /// `weight_bytes_per_step` over `decode_step_ms`.
    effective_gbps: f64,
    /// Read bandwidth of the same threads, or of the GPU: the mean of measurements before and after.
    read_bandwidth_gbps: f64,
    /// `effective_gbps / read_bandwidth_gbps`.
    bandwidth_ratio: f64,
    peak_rss_bytes: u64,
    /// SHA-256 of the last timed step's logits: runs whose arithmetic is the same have the same one, however they compute.
    logits_sha256: String,
    /// Largest number of bytes of the device's own memory that were in use, and its budget; absent for the CPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    device_peak_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    device_budget_bytes: Option<u64>,
    /// What the lanes of a modelled device did; absent for others.
    #[serde(skip_serializing_if = "Option::is_none")]
    prefill_lanes: Option<LaneReport>,
    #[serde(skip_serializing_if = "Option::is_none")]
    decode_lanes: Option<LaneReport>,
    /// Steps whose tokens the device chooses; absent where passes are not queued.
    #[serde(skip_serializing_if = "Option::is_none")]
    ahead: Option<AheadReport>,
    /// The same of what models the experts beside it.
    #[serde(skip_serializing_if = "Option::is_none")]
    prefill_host_lanes: Option<LaneReport>,
    #[serde(skip_serializing_if = "Option::is_none")]
    decode_host_lanes: Option<LaneReport>,
    /// Measured rates of the modelled device, and of what models the experts beside it.
    #[serde(skip_serializing_if = "Option::is_none")]
    device_rates: Option<GpuProfile>,
    #[serde(skip_serializing_if = "Option::is_none")]
    host_rates: Option<GpuProfile>,
}

/// Measures and prints the results.
pub(crate) fn run(args: &BenchArgs, environment: &Environment) -> anyhow::Result<()> {
    let mut options = LoadOptions::from_args(&args.model, environment)?;
    let traced = match &args.trace {
        Some(path) => Some((path, traced(&mut options.device)?)),
        None => None,
    };
    let rates = match args.rates {
        true => measured_rates(&options)?,
        false => [None, None],
    };
    let peers = args.peers as usize;
    if peers > 1 && args.model.residency == ResidencyArg::HostExperts {
        anyhow::bail!(
            "--peers has no effect on experts that the host computes\n  use --residency resident or stream-loading"
        );
    }
    options.share = ExpertShare::of(0, peers.max(1));
    let loaded = load::open(&args.model.model, options, &mut |_| {})?;
    let (device, host) = match &loaded {
        OnDevice::Virtual(loaded) => (
            Some(Arc::clone(loaded.model.backend())),
            loaded.modelled_host.clone(),
        ),
        OnDevice::Cpu(_) | OnDevice::Gpu(_) => (None, None),
    };
    let trace = traced.as_ref().map(|(_, trace)| Arc::clone(trace));
    let clock = Clock::new(device, trace).beside(host);
    let recording = traced.and_then(|(path, trace)| Some((path, trace.begin(usize::MAX)?)));
    // The device tells the last times as long as it is open.
    let (report, recorded) = on_device!(loaded, loaded => {
        let mut loaded = loaded;
        let of_group = (peers, args.experts);
        let _peers = match peers {
            1 => None,
            _ => Some(peers::start(&mut loaded, (&args.model, environment), of_group, args.sequences())?),
        };
        let report = run_on(args, &loaded, &clock)?;
        (report, recording.map(|(path, recording)| (path, recording.end())))
    });
    let [device_rates, host_rates] = rates;
    let report = Report {
        device_rates,
        host_rates,
        ..report
    };
    if let Some((path, recorded)) = recorded {
        trace_file::write(path, &report.device, recorded)?;
    }
    if args.json {
        print_data(&format!("{}\n", serde_json::to_string_pretty(&report)?))
    } else {
        print_data(&table(&report))
    }
}

/// Gives a device a trace.
///
/// # Errors
/// An error if it has no lanes.
fn traced(device: &mut DeviceOptions) -> anyhow::Result<Arc<Trace>> {
    match device {
        DeviceOptions::Cpu(_) => anyhow::bail!(
            "--trace has no effect with --device cpu, which has no lanes\n  leave it out, or use --device cuda or virtual:memory=8Gi"
        ),
        device => Ok(device.traced()),
    }
}

/// Rates of a modelled device, and of what models the experts beside it.
fn measured_rates(options: &LoadOptions<'_>) -> anyhow::Result<[Option<GpuProfile>; 2]> {
    let device = match &options.device {
        DeviceOptions::Virtual(device) => Some(measured(device.clone())?),
        DeviceOptions::Cpu(_) | DeviceOptions::Gpu(_) => None,
    };
    let host = match &options.host {
        HostOptions::Modelled(host) => Some(measured(host.clone())?),
        HostOptions::Cpu(_) => None,
    };
    Ok([device, host])
}

fn run_on<B: Backend>(
    args: &BenchArgs,
    loaded: &LoadedOn<B>,
    clock: &Clock,
) -> anyhow::Result<Report> {
    let backend = loaded.model.backend();
    let before_gbps = backend.read_bandwidth_gbps(PROBE_BYTES)?;
    let timings = measure(args, loaded, clock)?;
    let after_gbps = backend.read_bandwidth_gbps(PROBE_BYTES)?;
    let read_gbps = f64::midpoint(before_gbps, after_gbps);
    Ok(report(args, loaded, timings, read_gbps))
}

struct Timings {
    prefill_ms: f64,
    prefill_began_unix_ms: f64,
    prefill_lanes: LaneReports,
    decode: Decode,
    ahead: Option<AheadReport>,
}

/// What decoding took.
struct Decode {
    began_unix_ms: f64,
    /// Milliseconds of each step after the first few.
    step_ms: Vec<f64>,
    lanes: LaneReports,
    /// Bytes of weights that these steps read.
    bytes: u64,
    /// Logits `[batch, vocab]` of the last one.
    last: Vec<f32>,
}

fn measure<B: Backend>(
    args: &BenchArgs,
    loaded: &LoadedOn<B>,
    clock: &Clock,
) -> anyhow::Result<Timings> {
    let vocab = loaded.model.config().vocab_size as u32;
    let batch = args.batch as usize;
    let (sequences, capacity_tokens) = args.sequences();
    let kv_dtype = args.model.kv_dtype();
    let mut session = Session::new(&loaded.model, sequences, capacity_tokens, kv_dtype)?;
    // Distinct, spread-out tokens: repeated ones would route to the same experts.
    let prompt = |sequence: usize| -> Vec<u32> {
        (0..args.prefill)
            .map(|index| (index * 7919 + sequence as u32 * 104_729 + 1) % vocab)
            .collect()
    };

    let chunk = match (args.chunk, args.model.residency) {
        (Some(chunk), _) => chunk as usize,
        (None, ResidencyArg::StreamLoading) => args.prefill as usize,
        (None, _) => CHUNK_TOKENS,
    };
    for _ in 1..args.prompts {
        prefill(&mut session, 0, &prompt(0), chunk)?;
        session.rewind(0);
    }
    let started = clock.read();
    let mut last = prefill(&mut session, 0, &prompt(0), chunk)?;
    let (prefill_ms, prefill_lanes) = clock.since(&started, "prefill");
    let mut next = vec![argmax(&last)];
    for sequence in 1..batch {
        last = prefill(&mut session, sequence, &prompt(sequence), chunk)?;
        next.push(argmax(&last));
    }

    let from = next.clone();
    let decode = decode(args, loaded, clock, &mut session, next)?;
    let from = (args.prefill as usize, &from[..]);
    let steps = args.decode as usize;
    let ahead = ahead::measure(&loaded.model, clock, &mut session, from, steps)?;
    Ok(Timings {
        prefill_ms,
        prefill_began_unix_ms: started.unix_ms(),
        prefill_lanes,
        decode,
        ahead,
    })
}

/// Decodes one token of each sequence a step, from the tokens `next`.
fn decode<B: Backend>(
    args: &BenchArgs,
    loaded: &LoadedOn<B>,
    clock: &Clock,
    session: &mut Session<'_, B>,
    mut next: Vec<u32>,
) -> anyhow::Result<Decode> {
    let vocab = loaded.model.config().vocab_size;
    let mut step_ms = Vec::with_capacity(args.decode as usize);
    let mut last = Vec::new();
    let mut before = (clock.read(), loaded.model.stats().read_bytes);
    for step in 0..WARMUP_STEPS + args.decode as usize {
        if step == WARMUP_STEPS {
            before = (clock.read(), loaded.model.stats().read_bytes);
        }
        let tokens: Vec<[u32; 1]> = next.iter().map(|&token| [token]).collect();
        let appended: Vec<(usize, &[u32])> = tokens
            .iter()
            .enumerate()
            .map(|(sequence, token)| (sequence, token.as_slice()))
            .collect();
        let started = clock.read();
        last = session.step(&appended, false)?;
        if step >= WARMUP_STEPS {
            step_ms.push(clock.since(&started, "decode step").0);
        }
        next = last.chunks(vocab).map(argmax).collect();
    }
    let (started, bytes_before) = before;
    let (_, lanes) = clock.since(&started, "decode");
    let bytes_read = loaded.model.stats().read_bytes - bytes_before;
    Ok(Decode {
        began_unix_ms: started.unix_ms(),
        step_ms,
        lanes,
        bytes: bytes_read,
        last,
    })
}

fn prefill<B: Backend>(
    session: &mut Session<'_, B>,
    sequence: usize,
    prompt: &[u32],
    chunk: usize,
) -> anyhow::Result<Vec<f32>> {
    let mut logits = Vec::new();
    for tokens in prompt.chunks(chunk) {
        logits = session.step(&[(sequence, tokens)], false)?;
    }
    Ok(logits)
}

fn report<B: Backend>(
    args: &BenchArgs,
    loaded: &LoadedOn<B>,
    timings: Timings,
    read_gbps: f64,
) -> Report {
    let Timings {
        prefill_lanes,
        decode,
        ahead,
        ..
    } = timings;
    let mut sorted = decode.step_ms.clone();
    sorted.sort_by(f64::total_cmp);
    let decode_step_ms = sorted[sorted.len() / 2];
    let bytes_per_step = decode.bytes / u64::from(args.decode);
    let effective_gbps = bytes_per_step as f64 / decode_step_ms / 1e6;
    let memory = loaded.model.backend().device_memory();
    Report {
        model: args.model.model.display().to_string(),
        device: loaded.model.backend().describe(),
        kv_dtype: format!("{:?}", args.model.kv_dtype()),
        batch: args.batch,
        peers: args.peers,
        prefill_tokens: args.prefill,
        prefill_ms: timings.prefill_ms,
        prefill_tokens_per_s: f64::from(args.prefill) / timings.prefill_ms * 1e3,
        prefill_began_unix_ms: timings.prefill_began_unix_ms,
        decode_began_unix_ms: decode.began_unix_ms,
        decode_steps: args.decode,
        decode_step_ms,
        decode_steps_ms: decode.step_ms.clone(),
        decode_tokens_per_s: f64::from(args.batch) / decode_step_ms * 1e3,
        weight_bytes_per_step: bytes_per_step,
        effective_gbps,
        read_bandwidth_gbps: read_gbps,
        bandwidth_ratio: effective_gbps / read_gbps,
        peak_rss_bytes: peak_rss_bytes(),
        logits_sha256: sha256(&decode.last),
        device_peak_bytes: memory.map(|memory| memory.peak_bytes),
        device_budget_bytes: memory.map(|memory| memory.budget_bytes),
        prefill_lanes: prefill_lanes.device,
        decode_lanes: decode.lanes.device,
        prefill_host_lanes: prefill_lanes.host,
        decode_host_lanes: decode.lanes.host,
        ahead,
        device_rates: None,
        host_rates: None,
    }
}

/// SHA-256 of the bits of values, in hexadecimal.
fn sha256(values: &[f32]) -> String {
    let mut hasher = Sha256::new();
    for value in values {
        hasher.update(value.to_le_bytes());
    }
    let digest = hasher.finalize();
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Reads `VmHWM` of this process; 0 if /proc does not report it.
fn peak_rss_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|rest| rest.trim().trim_end_matches(" kB").parse::<u64>().ok());
    kib.map_or(0, |kib| kib * 1024)
}

fn table(report: &Report) -> String {
    let device = match (report.device_peak_bytes, report.device_budget_bytes) {
        (Some(peak), Some(budget)) => format!(
            "device   {:.1} MiB at most, of {:.1} MiB\n",
            peak as f64 / (1 << 20) as f64,
            budget as f64 / (1 << 20) as f64
        ),
        _ => String::new(),
    };
    let lanes: String = [
        ("prefill", &report.prefill_lanes),
        ("prefill, host", &report.prefill_host_lanes),
        ("decode", &report.decode_lanes),
        ("decode, host", &report.decode_host_lanes),
    ]
    .iter()
    .filter_map(|(phase, lanes)| Some(format!("lanes    {phase}: {}\n", lanes.as_ref()?)))
    .collect();
    let ahead = report.ahead.as_ref();
    let ahead = ahead.map_or_else(String::new, |ahead| format!("tokens   {ahead}\n"));
    format!(
        "model    {}  on {}, KV {}\n\
         prefill  {} tokens in {:.1} ms: {:.1} tokens/s\n\
         decode   batch {}: {:.2} ms a step (median of {}), {:.1} tokens/s\n\
         memory   {:.1} MB of weights a step at {:.1} GB/s: {:.2} of the {:.1} GB/s that the device reads\n\
         {device}{lanes}{ahead}",
        report.model,
        report.device,
        report.kv_dtype,
        report.prefill_tokens,
        report.prefill_ms,
        report.prefill_tokens_per_s,
        report.batch,
        report.decode_step_ms,
        report.decode_steps,
        report.decode_tokens_per_s,
        report.weight_bytes_per_step as f64 / 1e6,
        report.effective_gbps,
        report.bandwidth_ratio,
        report.read_bandwidth_gbps
    )
}
