//! Predictions beside what modelled devices took: `docs/benchmarks/predictions.py` measures both the rates, as a profile does,
//! and the steps and prompts.

#![allow(clippy::unwrap_used)] // a test that cannot read its data has failed

use std::collections::BTreeMap;

use hearth_crds::{GpuProfile, ModelFacts, PlanActivations, PlanMlaForm};
use serde::Deserialize;

use crate::node_ranks::DenseModules;
use crate::predict::{ExpertsAt, Predictor, Rates};
use crate::ring::RingLengths;

const MEASURED: &str = include_str!("../tests/measured.json");
/// Largest share by which a prediction may differ from a measurement.
const TOLERANCE: f64 = 0.15;
/// Tokens of a prompt before the steps that are measured, where a cell does not say.
const PROMPT_TOKENS: u32 = 64;

#[derive(Deserialize)]
struct Grid {
    facts: BTreeMap<String, ModelFacts>,
    rates: BTreeMap<String, Places>,
    cells: Vec<Cell>,
}

#[derive(Deserialize)]
struct Places {
    device: Measured,
    host: Option<Measured>,
}

/// Rates as a profile has them.
#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Measured {
    copy_gbps: f64,
    copy_beside_reads_gbps: f64,
    read_gbps: f64,
    bf16_gflops: f64,
    operation_us: f64,
    exchange_us: f64,
}

impl Measured {
    fn rates(self, facts: &ModelFacts) -> Rates {
        let profile = GpuProfile {
            copy_gbps: self.copy_gbps,
            copy_beside_reads_gbps: self.copy_beside_reads_gbps,
            read_gbps: self.read_gbps,
            bf16_gflops: self.bf16_gflops,
            operation_us: self.operation_us,
            exchange_us: self.exchange_us,
            virtual_device: Some(String::new()),
            ..GpuProfile::default()
        };
        Rates::of_gpu(&profile, PlanActivations::F32, facts)
    }
}

/// A prompt, or a step of several streams.
#[derive(Debug, Deserialize)]
struct Cell {
    model: String,
    rates: String,
    ring: Option<u32>,
    tokens: Option<u32>,
    chunk: Option<u32>,
    batch: Option<u32>,
    context: Option<u32>,
    #[serde(default)]
    streams_dense: bool,
    #[serde(default)]
    expanded: bool,
    #[serde(default)]
    dual: bool,
    #[serde(default)]
    cache: u32,
    measured_ms: f64,
}

impl Cell {
    fn predicted_ms(&self, grid: &Grid) -> f64 {
        let (facts, places) = (&grid.facts[&self.model], &grid.rates[&self.rates]);
        let copy_gbps = places.device.copy_gbps;
        let all_experts = f64::from(facts.experts) * f64::from(facts.routed_layers());
        let experts_at = match (self.ring, places.host) {
            (Some(slots), _) => ExpertsAt::Ring {
                slots: RingLengths::new((slots, slots), u32::MAX, u32::MAX, |_| u32::MAX),
                dense: match self.streams_dense {
                    true => DenseModules::Stream,
                    false => DenseModules::Stay,
                },
                copy_gbps,
            },
            (None, Some(host)) => ExpertsAt::Host {
                rates: host.rates(facts),
                copy_gbps,
                cached_share: f64::from(self.cache) / all_experts,
                kept_share: 1.0,
                dual_batch: self.dual,
            },
            (None, None) => ExpertsAt::Device,
        };
        let predictor = Predictor {
            facts,
            rates: places.device.rates(facts),
            kv_bytes_per_token: facts.kv_bytes_per_token(2, 2),
            kept_bytes: u64::MAX,
            mapped_bytes: u64::MAX,
            experts_at,
            mla_form: match self.expanded {
                true => PlanMlaForm::Expanded,
                false => PlanMlaForm::Absorbed,
            },
        };
        match (self.tokens, self.batch) {
            (Some(tokens), _) => predictor.prefill_ms(tokens, self.chunk.unwrap_or(tokens)),
            (None, Some(batch)) => {
                predictor.decode_ms(batch, self.context.unwrap_or(PROMPT_TOKENS) + 10)
            }
            (None, None) => f64::NAN,
        }
    }
}

#[test]
fn predictions_are_within_the_tolerance_of_what_modelled_devices_take() {
    let grid: Grid = serde_json::from_str(MEASURED).unwrap();
    assert!(grid.cells.len() >= 40, "{} cells", grid.cells.len());
    let mut off = Vec::new();
    for cell in &grid.cells {
        let ratio = cell.predicted_ms(&grid) / cell.measured_ms;
        println!("{ratio:.3} {cell:?}");
        if (ratio - 1.0).abs() > TOLERANCE || ratio.is_nan() {
            off.push(format!("{ratio:.3} of {cell:?}"));
        }
    }
    assert!(off.is_empty(), "{off:#?}");
}
