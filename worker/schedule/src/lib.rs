//! Pure scheduling: queue and budgets become the next step; with a simulator.
