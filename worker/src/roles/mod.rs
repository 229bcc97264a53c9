//! The processes of a plan.

mod control;
mod decode;
mod gateway;
mod prefill;
mod rank;
mod report;

pub(crate) use gateway::{GatewayArgs, run as gateway};
pub(crate) use rank::{RankArgs, decode, prefill};
