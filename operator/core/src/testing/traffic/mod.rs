//! A simulator of requests, prefill and decode workers under a rule that changes their numbers.
//!
//! Time passes in ticks of a tenth of a second. A request waits at the gateway for a slot of a decode worker, then at the prefill
//! worker with the fewest requests, which reads one prompt at a time; its stream then gets a token in each step of its decode
//! worker, and steps are longer the more streams there are. A worker that is added takes time to start; one
//! that is removed finishes what it has.

pub mod planned;
pub mod rules;
pub mod shapes;
mod windows;

use std::collections::VecDeque;

use self::rules::{Rule, View};
use self::shapes::Request;
use self::windows::Windows;
use crate::autoscale::queueing::StepTime;

/// Seconds of a tick.
const TICK_S: f64 = 0.1;
/// Seconds after the last arrival in which streams may end.
const AFTER_S: f64 = 900.0;

/// Times of the simulated workers, and the objectives.
#[derive(Clone, Copy, Debug)]
pub struct World {
    /// Milliseconds in which a prefill worker reads a token.
    pub prefill_ms_per_token: f64,
    /// Step of a decode worker.
    pub step: StepTime,
    /// Streams that a decode worker runs at once.
    pub slots_per_worker: u32,
    /// Seconds until a new worker is ready.
    pub start_s: f64,
    /// The most workers of a pool.
    pub max: u32,
    /// Objective of the time to the first token, in milliseconds.
    pub ttft_ms: f64,
    /// Objective of the mean time per token after it, in milliseconds.
    pub tpot_ms: f64,
}

/// What came of a simulation.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// Requests that arrived.
    pub requests: usize,
    /// Those of them within both objectives.
    pub kept: usize,
    /// Hours for which workers existed, starting and ending ones among them.
    pub worker_hours: f64,
    /// Every ten seconds: time in seconds, prefill workers and decode workers asked for, choices without a token.
    pub course: Vec<(f64, u32, u32, usize)>,
}

impl Outcome {
    /// Share of the requests that kept both objectives.
    pub fn share(&self) -> f64 {
        self.kept as f64 / self.requests.max(1) as f64
    }
}

#[derive(Clone, Debug)]
struct Stream {
    request: Request,
    tokens: f64,
    first_s: Option<f64>,
}

/// A prompt at a prefill worker.
#[derive(Clone, Debug)]
struct Prompt {
    request: Request,
    /// Seconds of reading that are left.
    left_s: f64,
    /// The decode worker that keeps a slot for it.
    decoder: u64,
}

#[derive(Clone, Debug, Default)]
struct Worker {
    id: u64,
    ready_s: f64,
    is_leaving: bool,
    /// The first is being read.
    prompts: VecDeque<Prompt>,
    /// Slots taken, those of prompts that are not read yet among them.
    held: u32,
    streams: Vec<Stream>,
    /// Seconds of the last tick in which it computed.
    busy_s: f64,
}

impl Worker {
    fn is_idle(&self) -> bool {
        self.prompts.is_empty() && self.held == 0
    }

    fn takes(&self, now_s: f64) -> bool {
        !self.is_leaving && self.ready_s <= now_s
    }
}

struct Simulation<'a> {
    world: World,
    now_s: f64,
    made: u64,
    waiting: VecDeque<Request>,
    /// Prefill and decode workers.
    pools: [Vec<Worker>; 2],
    windows: Windows,
    outcome: Outcome,
    rule: &'a mut dyn Rule,
}

/// Runs the requests of a shape, in the order of their arrival.
pub fn simulate(world: World, requests: &[Request], rule: &mut dyn Rule) -> Outcome {
    let mut simulation = Simulation {
        world,
        now_s: 0.0,
        made: 0,
        waiting: VecDeque::new(),
        pools: [Vec::new(), Vec::new()],
        windows: Windows::default(),
        outcome: Outcome {
            requests: requests.len(),
            ..Outcome::default()
        },
        rule,
    };
    simulation.resize(simulation.rule.first(), 0.0);
    let mut coming = requests.iter().copied().peekable();
    let last_s = requests.last().map_or(0.0, |last| last.at_s);
    let (mut next_rule_s, mut next_course_s) = (0.0, 0.0);
    while simulation.now_s < last_s + AFTER_S {
        while let Some(request) = coming.next_if(|it| it.at_s <= simulation.now_s) {
            simulation.windows.arrived(&request);
            simulation.waiting.push_back(request);
        }
        if coming.peek().is_none() && simulation.is_empty() {
            break;
        }
        simulation.tick();
        if simulation.now_s >= next_rule_s {
            next_rule_s = simulation.now_s + simulation.rule.every_s();
            simulation.scale();
        }
        if simulation.now_s >= next_course_s {
            next_course_s += 10.0;
            let [prefill, decode] = simulation.numbers();
            let point = (simulation.now_s, prefill, decode, simulation.unanswered());
            simulation.outcome.course.push(point);
        }
    }
    simulation.outcome
}

impl Simulation<'_> {
    fn is_empty(&self) -> bool {
        self.waiting.is_empty() && self.pools.iter().flatten().all(Worker::is_idle)
    }

    fn numbers(&self) -> [u32; 2] {
        let staying = |pool: &Vec<Worker>| pool.iter().filter(|it| !it.is_leaving).count() as u32;
        [staying(&self.pools[0]), staying(&self.pools[1])]
    }

    /// Choices that have no token yet.
    fn unanswered(&self) -> usize {
        let prompts = self.pools[0].iter().map(|it| it.prompts.len());
        let streams = self.pools[1].iter().flat_map(|it| &it.streams);
        let without = streams.filter(|it| it.first_s.is_none()).count();
        self.waiting.len() + prompts.sum::<usize>() + without
    }

    fn tick(&mut self) {
        self.now_s += TICK_S;
        self.admit();
        for read in self.read() {
            let decoders = &mut self.pools[1];
            if let Some(decoder) = decoders.iter_mut().find(|it| it.id == read.decoder) {
                decoder.streams.push(Stream {
                    request: read.request,
                    tokens: 0.0,
                    first_s: None,
                });
            }
        }
        self.decode();
        let running = self.pools[1].iter().map(|it| it.streams.len()).sum();
        self.windows.held(self.now_s, self.waiting.len(), running);
        for (pool, workers) in self.pools.iter_mut().enumerate() {
            let busy_s: f64 = workers.iter().map(|it| it.busy_s).sum();
            self.windows.worked(self.now_s, pool, busy_s);
            workers.retain(|it| !(it.is_leaving && it.is_idle()));
            self.outcome.worker_hours += workers.len() as f64 * TICK_S / 3600.0;
        }
    }

    /// Gives waiting requests a slot and a prefill worker, each the least loaded.
    fn admit(&mut self) {
        let (now_s, slots) = (self.now_s, self.world.slots_per_worker);
        let [readers, decoders] = &mut self.pools;
        while let Some(request) = self.waiting.front().copied() {
            let open = decoders
                .iter_mut()
                .filter(|it| it.takes(now_s) && it.held < slots);
            let free = readers.iter_mut().filter(|it| it.takes(now_s));
            let (Some(decoder), Some(reader)) = (
                open.min_by_key(|it| it.held),
                free.min_by_key(|it| it.prompts.len()),
            ) else {
                return;
            };
            decoder.held += 1;
            reader.prompts.push_back(Prompt {
                request,
                left_s: request.prompt_tokens * self.world.prefill_ms_per_token / 1e3,
                decoder: decoder.id,
            });
            self.waiting.pop_front();
        }
    }

    /// Lets prefill workers read; returns the prompts that are read now.
    fn read(&mut self) -> Vec<Prompt> {
        let mut read = Vec::new();
        for worker in &mut self.pools[0] {
            let mut left_s = TICK_S;
            while left_s > 0.0
                && let Some(prompt) = worker.prompts.front_mut()
            {
                let spent_s = left_s.min(prompt.left_s);
                (prompt.left_s, left_s) = (prompt.left_s - spent_s, left_s - spent_s);
                if prompt.left_s <= 1e-9 {
                    read.extend(worker.prompts.pop_front());
                }
            }
            worker.busy_s = TICK_S - left_s;
        }
        let tokens: f64 = read.iter().map(|it| it.request.prompt_tokens).sum();
        self.windows.read(self.now_s, tokens);
        read
    }

    /// Lets decode workers make steps; streams that have all their tokens end.
    fn decode(&mut self) {
        let (now_s, world) = (self.now_s, self.world);
        for worker in &mut self.pools[1] {
            let streams = worker.streams.len() as f64;
            worker.busy_s = if streams > 0.0 { TICK_S } else { 0.0 };
            if streams == 0.0 {
                continue;
            }
            let steps = TICK_S * 1e3 / world.step.at(streams);
            self.windows.stepped(now_s, steps, steps * streams);
            for stream in &mut worker.streams {
                stream.tokens += steps;
                if stream.first_s.is_none() && stream.tokens >= 1.0 {
                    stream.first_s = Some(now_s);
                    self.windows
                        .first(now_s, (now_s - stream.request.at_s) * 1e3);
                }
            }
            let ended = |it: &mut Stream| it.tokens >= it.request.output_tokens;
            for stream in worker.streams.extract_if(.., ended) {
                worker.held -= 1;
                let first_s = stream.first_s.unwrap_or(now_s);
                let ttft_ms = (first_s - stream.request.at_s) * 1e3;
                let rest = (stream.request.output_tokens - 1.0).max(1.0);
                let tpot_ms = (now_s - first_s) * 1e3 / rest;
                self.windows
                    .ended(now_s, stream.request.output_tokens, tpot_ms);
                let keeps = ttft_ms <= world.ttft_ms && tpot_ms <= world.tpot_ms;
                self.outcome.kept += usize::from(keeps);
            }
        }
    }

    fn scale(&mut self) {
        let ready = |pool: &Vec<Worker>| {
            let ready = pool.iter().filter(|it| it.takes(self.now_s));
            ready.count() as u32
        };
        let view = View {
            now_s: self.now_s,
            replicas: self.numbers(),
            ready: [ready(&self.pools[0]), ready(&self.pools[1])],
            busy_workers: self.windows.busy_workers(self.now_s),
            demand: self
                .windows
                .demand(self.now_s, self.waiting.len(), self.unanswered()),
            world: self.world,
        };
        let wanted = self.rule.decide(&view);
        self.resize(wanted, self.world.start_s);
    }

    /// Starts workers, or lets the newest ones finish.
    fn resize(&mut self, wanted: [u32; 2], start_s: f64) {
        let now = self.numbers();
        for (pool, workers) in self.pools.iter_mut().enumerate() {
            for _ in now[pool]..wanted[pool] {
                self.made += 1;
                workers.push(Worker {
                    id: self.made,
                    ready_s: self.now_s + start_s,
                    ..Worker::default()
                });
            }
            let staying = workers.iter_mut().rev().filter(|it| !it.is_leaving);
            let surplus = now[pool].saturating_sub(wanted[pool]);
            staying
                .take(surplus as usize)
                .for_each(|it| it.is_leaving = true);
        }
    }
}
