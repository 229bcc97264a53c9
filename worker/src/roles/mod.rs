//! The processes of a plan.

mod agent;
mod binding;
mod control;
mod decode;
mod device_plugin;
mod gateway;
mod group;
mod layers;
mod linger;
mod load_watch;
mod power;
mod prefill;
mod process;
mod rank;
mod rank_options;
mod report;
mod routes;
mod spans;
mod stand_ins;
mod supervise;
mod trace;
mod traces;
mod turn;

pub(crate) use agent::{AgentArgs, run as agent};
pub(crate) use device_plugin::{DevicePluginArgs, run as device_plugin};
pub(crate) use gateway::{GatewayArgs, run as gateway};
pub(crate) use linger::{LingerArgs, run as linger};
pub(crate) use power::{PowerArgs, run as power};
pub(crate) use rank::{RankArgs, decode, prefill, stage};
pub(crate) use supervise::{SuperviseArgs, run as supervise};
pub(crate) use trace::{TraceArgs, run as trace};
