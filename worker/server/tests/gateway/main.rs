//! Tests of the gateway from outside: HTTP on one side, fake workers on real sockets on the other.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
#![allow(clippy::too_many_lines, reason = "tables of cases")]

mod chat;
mod completions;
mod cors;
mod drain;
mod failover;
mod http;
mod keys;
mod members;
mod mixed;
mod refusals;
mod refusals_content;
mod refusals_schema;
mod routing;
mod slow_clients;
mod support;
mod tools;
mod traces;
