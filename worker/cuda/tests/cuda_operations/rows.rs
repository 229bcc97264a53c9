//! Rows on their way to the host and from it, beside what is computed; missing waits are found by the host model.

use hearth_kernels::ops::*;

use crate::common::*;
use crate::support::{is_hardware, own, plain};

const BUDGET_BYTES: u64 = 128 << 20;
const COLS: usize = 96;

fn bytes_of(values: &[f32]) -> Vec<u8> {
    values
        .iter()
        .flat_map(|value| value.to_le_bytes())
        .collect()
}

#[test]
fn rows_leave_as_they_were_when_their_copy_was_begun() {
    let gpu = plain();
    let mut rng = Rng(3);
    for rows in [1, 100] {
        gpu.begin_pass(rows).unwrap();
        let values = rng.normals(rows * COLS);
        let mut x = gpu.upload(rows, COLS, &values).unwrap();
        let parts = [0..rows, 0..rows / 2, rows / 2..rows, rows..rows];
        let copies = parts.map(|part| {
            let copy = gpu.rows_read_begin(&x, part.clone()).unwrap();
            (copy, bytes_of(&values[part.start * COLS..part.end * COLS]))
        });
        let more = gpu.upload(rows, COLS, &values).unwrap();
        gpu.add_assign(&mut x, &more).unwrap();
        drop((x, more));
        for (copy, want) in copies {
            gpu.host_copy_wait(&copy).unwrap();
            assert!(gpu.host_copy_end(copy).unwrap() == want, "{rows} rows");
        }
    }
    let x = gpu.zeros(3, COLS).unwrap();
    assert!(gpu.rows_read_begin(&x, 2..4).is_err());
    let copy = gpu.rows_read_begin(&x, 0..3).unwrap();
    let error = gpu.host_copy_end(copy).unwrap_err().to_string();
    assert!(error.contains("before its copy was waited for"), "{error}");
}

#[test]
fn more_rows_than_pinned_memory_is_kept_for_leave_as_well() {
    let gpu = own(BUDGET_BYTES);
    let values = Rng(4).normals(2200 * 1000);
    let x = gpu.upload(2200, 1000, &values).unwrap();
    let copy = gpu.rows_read_begin(&x, 50..2200).unwrap();
    gpu.host_copy_wait(&copy).unwrap();
    assert!(gpu.host_copy_end(copy).unwrap() == bytes_of(&values[50_000..]));
}

#[test]
fn rows_that_come_in_any_order_are_read_behind_all_of_them() {
    let gpu = own(BUDGET_BYTES);
    let mut rng = Rng(5);
    for rows in [4, 200] {
        gpu.begin_pass(rows).unwrap();
        let values = rng.normals(rows * COLS);
        // Whose memory the first of them takes.
        let mut x = gpu.upload(rows, COLS, &values).unwrap();
        gpu.add_assign(&mut x, &gpu.zeros(rows, COLS).unwrap())
            .unwrap();
        drop(x);
        let mut incoming = gpu.rows_write_begin(rows, COLS).unwrap();
        let waits = gpu.waits();
        for first in [rows / 2, 0] {
            // What is computed meanwhile is not waited for.
            let beside = gpu.zeros(rows, COLS).unwrap();
            gpu.sum(beside, gpu.zeros(rows, COLS).unwrap()).unwrap();
            let part = first * COLS..(first + rows / 2) * COLS;
            gpu.rows_write(&mut incoming, first, &values[part]).unwrap();
        }
        assert!(
            gpu.rows_write(&mut incoming, rows, &values[..COLS])
                .is_err()
        );
        assert!(gpu.rows_write(&mut incoming, 0, &values[..3]).is_err());
        let arrived = gpu.rows_write_end(incoming).unwrap();
        assert!(gpu.waits() - waits <= 1 || is_hardware());
        assert_same_bits(&gpu.download(&arrived).unwrap(), &values, "rows");
    }
}

#[test]
fn memory_of_rows_that_nobody_wants_any_more_is_used_again_behind_their_copies() {
    let gpu = own(BUDGET_BYTES);
    let values = Rng(6).normals(200 * COLS);
    for _ in 0..3 {
        let mut incoming = gpu.rows_write_begin(200, COLS).unwrap();
        gpu.rows_write(&mut incoming, 0, &values).unwrap();
        drop(incoming);
        let x = gpu.zeros(200, COLS).unwrap();
        assert!(gpu.download(&x).unwrap().iter().all(|value| *value == 0.0));
    }
}
