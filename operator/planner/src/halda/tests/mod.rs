//! Tests of the choice of a ring, against enumeration.

mod by_hand;
mod choice;
mod objective;
