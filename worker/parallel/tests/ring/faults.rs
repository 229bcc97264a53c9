//! Members that fail, lie or are lost.

use std::sync::Arc;
use std::time::Duration;

use hearth_kernels::{BlockId, Span};
use hearth_model::ModelError;
use hearth_parallel::{Group, LocalGroup, Op, Route, Tag};

use crate::harness::in_ring;
use crate::support::Files;

const LAYERS: usize = 4;

fn span(rows: usize, block: u32) -> Vec<Span> {
    vec![Span {
        first_row: 0,
        rows,
        start: 0,
        blocks: vec![BlockId(block)],
    }]
}

#[test]
fn a_stage_that_fails_tells_the_head_and_goes_on() {
    let files = Files::of("qwen3", LAYERS);
    let route = Route::around(&[1, 1], LAYERS).unwrap();
    in_ring(&files, &route, usize::MAX, |head, group| {
        let want = head.step(&[1, 2, 3], span(3, 0)).unwrap();
        // A message for a layer that the stage does not begin a window with.
        let tag = Tag {
            pass: 1,
            flight: 0,
            layer: 2,
            op: Op::Stream,
        };
        group.send(1, tag, Vec::new()).unwrap();
        let error = head.step(&[1, 2, 3], span(3, 0)).unwrap_err();
        assert!(matches!(error, ModelError::Member { .. }), "{error}");
        let text = error.to_string();
        assert!(
            text.starts_with("rank 1: ") && text.contains("not for this rank"),
            "{text}"
        );
        assert_eq!(head.step(&[1, 2, 3], span(3, 0)).unwrap(), want);
    });
}

#[test]
fn bytes_that_are_no_rows_are_a_fault_of_their_pass() {
    let files = Files::of("qwen3", LAYERS);
    let route = Route::around(&[2, 2], LAYERS).unwrap();
    in_ring(&files, &route, usize::MAX, |head, group| {
        let tag = Tag {
            pass: 0,
            flight: 0,
            layer: 2,
            op: Op::Stream,
        };
        for bytes in [vec![], vec![255; 40], vec![0; 1000]] {
            group.send(1, tag, bytes).unwrap();
            let error = group.recv(1, Tag { layer: 4, ..tag }, Duration::from_secs(20));
            assert!(error.unwrap_err().to_string().contains("rank 0"));
        }
        head.step(&[4], span(1, 3)).unwrap();
    });
}

#[test]
fn a_stage_that_is_lost_ends_the_pass_with_its_name() {
    let files = Files::of("qwen3", LAYERS);
    let route = Route::around(&[1, 1, 2], LAYERS).unwrap();
    let mut ranks = LocalGroup::of(3);
    let head: Arc<dyn Group> = Arc::new(ranks.remove(0));
    let mut head = files.head(head, &route, usize::MAX);
    let [second, third] = ranks.try_into().ok().unwrap();
    let lost = std::thread::spawn(move || {
        // It takes what it is sent, and dies.
        second
            .next(Op::Stream, Duration::from_secs(20))
            .unwrap()
            .unwrap();
    });
    let error = head.step(&[1, 2], span(2, 0)).unwrap_err();
    assert!(matches!(error, ModelError::Group { .. }), "{error}");
    assert!(error.to_string().contains("rank 1 is lost"), "{error}");
    lost.join().unwrap();
    // Whoever comes later learns of it at once.
    let error = head.step(&[1, 2], span(2, 0)).unwrap_err();
    assert!(matches!(error, ModelError::Group { .. }), "{error}");
    drop(third);
}

#[test]
fn a_stage_that_answers_with_other_rows_is_found_out() {
    let files = Files::of("qwen3", LAYERS);
    let route = Route::around(&[2, 2], LAYERS).unwrap();
    let mut ranks = LocalGroup::of(2);
    let head: Arc<dyn Group> = Arc::new(ranks.remove(0));
    let mut head = files.head(head, &route, usize::MAX);
    let liar = ranks.remove(0);
    let lies = std::thread::spawn(move || {
        let message = liar
            .next(Op::Stream, Duration::from_secs(20))
            .unwrap()
            .unwrap();
        let tag = Tag {
            layer: 4,
            ..message.tag
        };
        liar.send(0, tag, message.bytes[..message.bytes.len() / 2].to_vec())
            .unwrap();
        liar
    });
    let error = head.step(&[1, 2], span(2, 0)).unwrap_err();
    assert!(matches!(error, ModelError::Group { .. }), "{error}");
    assert!(error.to_string().contains("rank 1"), "{error}");
    lies.join().unwrap();
}
