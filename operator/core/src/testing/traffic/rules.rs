//! Rules that change the numbers of simulated workers: none, a HorizontalPodAutoscaler's, and Hearth's.

use std::collections::VecDeque;

use super::World;
use crate::autoscale::queueing::StepTime;
use crate::autoscale::{Bounds, Input, Memory, Objectives, Role, Service, advise};
use crate::follow::START_S;
use crate::observed::Demand;
use crate::testing::at;

/// What plans predict of the workers' times, as a multiple of the truth.
pub(super) const PREDICTED: f64 = 0.7;

/// What a rule sees; prefill first, then decode.
#[derive(Clone, Debug)]
pub struct View {
    /// Seconds from the start.
    pub now_s: f64,
    /// Workers that are asked for.
    pub replicas: [u32; 2],
    /// Those of them that are ready.
    pub ready: [u32; 2],
    /// Mean number of workers that computed lately.
    pub busy_workers: [f64; 2],
    /// What a gateway measured.
    pub demand: Demand,
    /// The world.
    pub world: World,
}

/// A rule.
pub trait Rule {
    /// Numbers to begin with.
    fn first(&self) -> [u32; 2] {
        [1, 1]
    }

    /// Seconds between decisions.
    fn every_s(&self) -> f64;

    /// Numbers of prefill and decode workers.
    fn decide(&mut self, view: &View) -> [u32; 2];
}

/// Pools of a fixed size.
#[derive(Clone, Copy, Debug)]
pub struct Fixed(pub [u32; 2]);

impl Rule for Fixed {
    fn first(&self) -> [u32; 2] {
        self.0
    }

    fn every_s(&self) -> f64 {
        1e9
    }

    fn decide(&mut self, _view: &View) -> [u32; 2] {
        self.0
    }
}

/// A HorizontalPodAutoscaler of each pool on the use of its CPUs, with the defaults of Kubernetes: every 15 s, a tolerance of a
/// tenth, the highest recommendation of five minutes on the way down, and at most twice as many or four more at a time on the
/// way up. Pods that are not ready count as idle where that keeps it from growing.
#[derive(Clone, Debug)]
pub struct Hpa {
    /// Use of the CPUs to aim at, as a share.
    pub target: f64,
    recommended: [VecDeque<(f64, u32)>; 2],
}

impl Hpa {
    /// A rule with this target.
    pub fn new(target: f64) -> Self {
        Self {
            target,
            recommended: [VecDeque::new(), VecDeque::new()],
        }
    }
}

impl Rule for Hpa {
    fn every_s(&self) -> f64 {
        15.0
    }

    fn decide(&mut self, view: &View) -> [u32; 2] {
        [0, 1].map(|pool| {
            let (now, ready) = (view.replicas[pool], view.ready[pool]);
            let ratio = |workers: u32| {
                let workers = f64::from(workers.max(1));
                (view.busy_workers[pool] / workers).min(1.0) / self.target
            };
            let mut wanted = now;
            let of_ready = ratio(ready);
            if of_ready > 1.1 && ratio(now) > 1.1 {
                wanted = (f64::from(now) * ratio(now)).ceil() as u32;
            } else if of_ready < 0.9 {
                wanted = (f64::from(ready) * of_ready).ceil() as u32;
            }
            let wanted = wanted.clamp(1, view.world.max).min((2 * now).max(now + 4));
            let past = &mut self.recommended[pool];
            past.push_back((view.now_s, wanted));
            past.retain(|(at_s, _)| view.now_s - at_s <= 300.0);
            let highest = past.iter().map(|(_, it)| *it).max().unwrap_or(wanted);
            if wanted >= now {
                wanted
            } else {
                highest.min(now)
            }
        })
    }
}

/// Hearth's own, every five seconds, as if there were room for every number: the advice without the plans.
#[derive(Clone, Copy, Debug)]
pub struct Auto {
    memory: [Memory; 2],
    /// What the plan predicts of the workers' times, as a multiple of the truth.
    pub predicted: f64,
}

impl Default for Auto {
    fn default() -> Self {
        Self {
            memory: [Memory::default(); 2],
            predicted: PREDICTED,
        }
    }
}

impl Rule for Auto {
    fn every_s(&self) -> f64 {
        5.0
    }

    fn decide(&mut self, view: &View) -> [u32; 2] {
        let World {
            prefill_ms_per_token,
            step,
            slots_per_worker,
            start_s,
            ..
        } = view.world;
        let predicted = Service {
            prefill_ms_per_token: prefill_ms_per_token * self.predicted,
            is_chunked: false,
            step: StepTime::scaled(step, self.predicted),
            slots_per_worker,
            start_s: start_s.clamp(START_S[0], START_S[1]),
        };
        let service = predicted.measured(&view.demand);
        let roles = [Role::Prefill, Role::Decode];
        [0, 1].map(|pool| {
            let advice = advise(&Input {
                now: at(view.now_s as i64),
                role: roles[pool],
                bounds: Bounds {
                    replicas: view.replicas[pool],
                    ready: view.ready[pool],
                    min: 1,
                    max: view.world.max,
                },
                demand: Some(&view.demand),
                service: &service,
                objectives: Objectives {
                    ttft_ms: Some(view.world.ttft_ms),
                    tpot_ms: Some(view.world.tpot_ms),
                },
                memory: self.memory[pool],
            });
            self.memory[pool] = advice.memory;
            advice.replicas
        })
    }
}
