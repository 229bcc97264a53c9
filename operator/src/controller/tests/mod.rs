//! Tests of the pure part: whole visits and whole rollouts against a cluster on paper.

mod decide;
mod events;
mod models;
mod refusals;
mod rollout;
mod scale;
mod sim;
mod upgrade;
mod world;
