//! The step loop: schedule, modules, sampler.
