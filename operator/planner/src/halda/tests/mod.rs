//! Tests of the choice of a ring, against enumeration.

mod choice;
mod objective;
mod problems;
