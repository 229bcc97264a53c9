//! The gateway: OpenAI API over HTTP, routing, failover, metrics.
