//! Members that fail, lie or are lost.

use std::sync::Arc;
use std::time::Duration;

use hearth_kernels::{BlockId, Span};
use hearth_model::{Batch, ModelError, Observer, Part};
use hearth_parallel::{Group, LocalGroup, Op, Route, StageError, Tag};

use crate::harness::in_ring;
use crate::support::{Files, Head, cache};

const LAYERS: usize = 4;

fn span(rows: usize, block: u32) -> Vec<Span> {
    vec![Span {
        first_row: 0,
        rows,
        start: 0,
        blocks: vec![BlockId(block)],
    }]
}

/// Gives a pass up after so many steps on its way: blocks of its flights, which take turns, and waits for what is away.
struct GivesUp {
    steps_left: usize,
    last: Option<usize>,
}

impl GivesUp {
    fn after(steps: usize) -> Self {
        Self {
            steps_left: steps,
            last: None,
        }
    }
}

impl<B: hearth_kernels::Backend> Observer<B> for GivesUp {
    fn goes_on(&mut self, done: usize, _: usize) -> bool {
        // It is asked several times in one block, and again and again while it waits.
        if self.last.replace(done) == Some(done) {
            return true;
        }
        let left = self.steps_left.checked_sub(1);
        self.steps_left = left.unwrap_or_default();
        left.is_some()
    }
}

/// Five flights of 16 rows at most.
#[test]
fn a_pass_that_is_given_up_leaves_the_stages_ready_for_the_next() {
    const ROWS: usize = 70;
    let spans = || {
        vec![Span {
            first_row: 0,
            rows: ROWS,
            start: 0,
            blocks: [3, 1, 7, 0, 5].map(BlockId).to_vec(),
        }]
    };
    let given_up = || Batch {
        tokens: vec![9; ROWS],
        spans: spans(),
        logit_rows: vec![3],
    };
    // Rows of the pass before would show.
    let tokens: Vec<u32> = (0..ROWS as u32).collect();
    for case in ["qwen3", "deepseek_v3"] {
        let files = Files::of(case, LAYERS);
        let model = files.part(&Part::whole(LAYERS));
        let kv = cache(&model);
        let want = Head { model, kv }.step(&tokens, spans()).unwrap();
        for windows in [&[1, 1][..], &[2, 2], &[1, 1, 1]] {
            let route = Route::around(windows, LAYERS).unwrap();
            in_ring(&files, &route, 16, |head, _| {
                let mut counts = GivesUp::after(usize::MAX);
                let whole = head.model.forward(&given_up(), &mut head.kv, &mut counts);
                whole.unwrap();
                let steps = usize::MAX - counts.steps_left;
                // Every flight is on its way in some of them.
                assert!(steps > 2 * 5, "{steps}");
                for after in 0..steps {
                    let mut gives_up = GivesUp::after(after);
                    let ended = head.model.forward(&given_up(), &mut head.kv, &mut gives_up);
                    assert!(matches!(ended, Err(ModelError::GivenUp)), "{after}");
                    let got = head.step(&tokens, spans()).unwrap();
                    assert!(got == want, "{case}: {windows:?}, after {after} steps");
                }
            });
        }
    }
}

#[test]
fn a_stage_that_fails_tells_the_head_and_goes_on() {
    let files = Files::of("qwen3", LAYERS);
    let route = Route::around(&[1, 1], LAYERS).unwrap();
    in_ring(&files, &route, usize::MAX, |head, group| {
        let want = head.step(&[1, 2, 3], span(3, 0)).unwrap();
        // A row whose keys and values are to be where the stage has no memory.
        let tag = Tag {
            pass: 1,
            flight: 0,
            layer: 1,
            op: Op::Stream,
        };
        let of_last_block = [10, 9, 8, 1, 26, 5, 255, 255, 255, 255, 15];
        let header = [&[of_last_block.len() as u8], &of_last_block[..]].concat();
        let row = vec![0; 4 * files.config.hidden_size];
        group.send(1, tag, [header, row].concat()).unwrap();
        let error = head.step(&[1, 2, 3], span(3, 0)).unwrap_err();
        assert!(matches!(error, ModelError::Member { .. }), "{error}");
        assert!(error.to_string().starts_with("rank 1: "), "{error}");
        assert_eq!(head.step(&[1, 2, 3], span(3, 0)).unwrap(), want);
    });
}

#[test]
fn a_member_that_sends_a_stage_what_it_should_not_is_lost_by_name() {
    let files = Files::of("qwen3", LAYERS);
    let route = Route::around(&[1, 1, 2], LAYERS).unwrap();
    for (layer, bytes, why) in [
        (2, vec![], "sequences cannot be read"),
        (2, vec![255; 40], "sequences cannot be read"),
        (2, vec![0; 1000], "in 999 bytes instead of 0"),
        (3, vec![], "not for this rank"),
    ] {
        let [_head, liar, group] = LocalGroup::of(3).try_into().ok().unwrap();
        let tag = Tag {
            pass: 0,
            flight: 0,
            layer,
            op: Op::Stream,
        };
        liar.send(2, tag, bytes).unwrap();
        let mut stage = files.stage(route.part(2).unwrap());
        let error = stage.follow(&group, &route, || true).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("rank 1 is lost"), "{text}");
        assert!(text.contains(why), "no {why:?} in {text}");
        assert_eq!(StageError::Group(group.lost().unwrap()), error);
    }
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
