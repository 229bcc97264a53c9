//! Tests of the pure part: whole reconciles and whole rollouts against a simulated cluster.

mod decide;
mod events;
mod fake_cluster;
mod gateways;
mod handover;
mod lost_gpus;
mod models;
mod nodes;
mod peers;
mod progress;
mod refusals;
mod rings;
mod rollout;
mod scale;
mod scaling;
mod shared_gpus;
mod sim;
mod suspend;
mod template;
mod upgrade;
mod weather;
