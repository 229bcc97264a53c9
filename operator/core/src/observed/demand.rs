//! What a deployment's gateways and workers measured lately: the load that its pools follow.

/// Load of one deployment over the last minutes, of all its gateways together.
///
/// Gateways count from their own start, so whoever fills this in takes differences, and a counter that fell counts from nothing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Demand {
    /// Seconds since the gateway that was read longest ago was read.
    pub age_s: f64,
    /// Seconds that `arrivals` were counted over; 0 before there are two readings.
    pub span_s: f64,
    /// Choices that arrived within the span, accepted or not.
    pub arrivals: f64,
    /// Seconds that `long_arrivals` were counted over: the span and several times as long before it.
    pub long_span_s: f64,
    /// Choices that arrived within the long span.
    pub long_arrivals: f64,
    /// Seconds that `recent_arrivals` were counted over: the last part of the span.
    pub recent_span_s: f64,
    /// Choices that arrived within the last part of the span.
    pub recent_arrivals: f64,
    /// Mean prompt of the choices that arrived, in tokens; `None` before the first.
    pub prompt_tokens: Option<f64>,
    /// Variance of these prompts, divided by the square of their mean.
    pub prompt_cv2: f64,
    /// Mean answer, in tokens; `None` before the first has ended.
    pub output_tokens: Option<f64>,
    /// Choices that wait for a slot of a decode worker.
    pub queued: f64,
    /// The fewest that waited so at any reading in the last part of the span; 0 before these are of several seconds.
    pub queued_least: f64,
    /// Choices that decode workers read or answer at a time, on the mean of the last part of the span; `None` where no
    /// gateway has seen one.
    pub running: Option<f64>,
    /// Choices that have arrived and have no token yet, those that wait among them.
    pub unanswered: f64,
    /// Choices that are not answered in full, at gateways that were read lately, whatever is known of the others; of one that
    /// says only that there are some, one.
    pub held: f64,
    /// Seconds for which no gateway has had a choice that was not answered in full; `None` where one does not say.
    pub idle_s: Option<f64>,
    /// Time to the first token that nine of ten choices kept, in milliseconds.
    pub ttft_p90_ms: Option<f64>,
    /// Time per token after the first that nine of ten choices kept, in milliseconds.
    pub tpot_p90_ms: Option<f64>,
    /// Computation of prefill workers per prompt token of all choices that started, those whose KV was reused among them, in
    /// milliseconds; `None` while none has been seen.
    pub prefill_ms_per_token: Option<f64>,
    /// Share of the prompts that prefill workers read, of the choices that started within the span; `None` where there were none, or
    /// a gateway does not say.
    pub handed_over: Option<f64>,
    /// Share of the prompt tokens that prefill workers read, of the choices that started within the long span; `None` likewise.
    pub handed_over_tokens: Option<f64>,
    /// Mean forward pass of decode workers, in milliseconds.
    pub step_ms: Option<f64>,
    /// Mean number of tokens that such a pass generates.
    pub step_tokens: Option<f64>,
}
