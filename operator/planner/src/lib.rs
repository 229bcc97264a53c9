//! Pure: deployment spec, model facts and node profiles become a plan.
