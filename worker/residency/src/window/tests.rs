use proptest::prelude::*;

use super::*;
use Action::{Prefetch, Release};

/// Embedding, six layers of 10 bytes, head.
fn dense(budget_bytes: u64, lookahead: usize) -> Window {
    let mut modules = vec![(Kind::Sparse, 1000)];
    modules.extend([(Kind::Always, 10); 6]);
    modules.push((Kind::Head, 10));
    Window::new(&modules, budget_bytes, lookahead, ReadAhead::Least)
}

fn run(window: &mut Window, index: Index) -> Vec<Action> {
    let mut actions = window.acquire(index);
    actions.extend(window.release(index));
    actions
}

#[test]
fn what_comes_next_is_asked_for_once() {
    let mut window = dense(1000, 2);
    assert_eq!(
        run(&mut window, 0),
        vec![Release(0)],
        "little of the embedding is read"
    );
    assert_eq!(
        run(&mut window, 1),
        vec![Prefetch(1), Prefetch(2), Prefetch(3)]
    );
    assert_eq!(run(&mut window, 2), vec![Prefetch(4)]);
    for index in 3..=7 {
        run(&mut window, index);
    }
    // The window extends into the next token.
    assert_eq!(window.resident_bytes(), 70);
    assert!((1..=7).all(|index| run(&mut window, index).is_empty()));
}

#[test]
fn what_is_needed_last_goes_first_and_nothing_is_displaced_that_comes_sooner() {
    // No room for two modules beside the head: none can stay for good.
    let mut window = dense(25, 2);
    assert_eq!(run(&mut window, 1), vec![Prefetch(1), Prefetch(2)]);
    // Module 1 has just run, so it is needed last.
    assert_eq!(run(&mut window, 2), vec![Release(1), Prefetch(3)]);
    assert_eq!(run(&mut window, 3), vec![Release(2), Prefetch(4)]);
    // A window wider than the budget stops at modules that it would displace (prima.cpp, appendix A.1).
    let mut wide = dense(25, 6);
    assert_eq!(run(&mut wide, 1), vec![Prefetch(1), Prefetch(2)]);
    assert_eq!(run(&mut wide, 2), vec![Release(1), Prefetch(3)]);
}

#[test]
fn the_same_modules_stay_and_others_come_as_soon_as_there_is_room() {
    // Head and two of the six layers stay, and two at a time of the other four pass.
    let mut window = dense(50, 2);
    let mut cycle =
        || -> Vec<Vec<Action>> { (0..8).map(|index| run(&mut window, index)).collect() };
    cycle();
    let none = Vec::new();
    let expected = [
        vec![Release(0)],
        vec![Release(1), Prefetch(4)],
        vec![Release(2), Prefetch(5)],
        none.clone(),
        vec![Release(4), Prefetch(1)],
        vec![Release(5), Prefetch(2)],
        none.clone(),
        none,
    ];
    assert_eq!(cycle(), expected);
    assert_eq!(cycle(), expected);
    assert_eq!(window.resident_bytes(), 50);
}

#[test]
fn each_module_is_asked_for_once_a_cycle_and_those_that_stay_never_again() {
    for (budget, most) in [(20, 7), (30, 6), (40, 5), (60, 3), (70, 0)] {
        let mut window = dense(budget, 3);
        let mut cycle = || -> usize {
            let actions = (0..8)
                .flat_map(|index| run(&mut window, index))
                .collect::<Vec<_>>();
            actions.iter().filter(|a| matches!(a, Prefetch(_))).count()
        };
        cycle();
        let asked = cycle();
        assert!(asked <= most, "budget {budget}: {asked} prefetches");
    }
}

#[test]
fn a_held_module_stays_whatever_the_budget() {
    let mut window = dense(10, 3);
    assert_eq!(window.acquire(1), vec![Prefetch(1)]);
    assert_eq!(
        window.acquire(2),
        vec![Prefetch(2)],
        "over budget, and nothing to give back"
    );
    assert_eq!(window.resident_bytes(), 20);
    assert_eq!(window.release(1), vec![Release(1)]);
    assert_eq!(window.release(2), vec![]);
}

/// One layer: attention, router, four experts of 10 bytes; head.
fn sparse(budget_bytes: u64) -> Window {
    let expert = (Kind::Expert { layer: 0 }, 10);
    let modules = [
        (Kind::Sparse, 0),
        (Kind::Always, 10),
        (Kind::Always, 10),
        expert,
        expert,
        expert,
        expert,
        (Kind::Always, 10),
    ];
    Window::new(&modules, budget_bytes, 2, ReadAhead::Least)
}

#[test]
fn chosen_experts_come_and_the_least_chosen_go() {
    let mut window = sparse(50);
    run(&mut window, 1);
    run(&mut window, 2);
    assert_eq!(window.resident_bytes(), 30);
    assert_eq!(window.announce(&[3, 5]), vec![Prefetch(3), Prefetch(5)]);
    assert_eq!(window.group(&[3, 5]), 2);
    run(&mut window, 3);
    run(&mut window, 5);
    // The next token chooses 3 again, then 6: 5 was chosen less often, so it is released.
    assert_eq!(window.announce(&[3]), vec![]);
    run(&mut window, 3);
    assert_eq!(window.announce(&[6]), vec![Release(5), Prefetch(6)]);
}

#[test]
fn experts_that_were_chosen_and_did_not_run_give_way() {
    let mut window = sparse(30);
    assert_eq!(window.announce(&[3, 4, 5]).len(), 3);
    run(&mut window, 3);
    // The step ended there. What it had chosen besides must not keep the next one from its experts.
    assert_eq!(window.announce(&[3, 6]), vec![Release(5), Prefetch(6)]);
    window.forget(6);
    assert_eq!(window.resident_bytes(), 20);
    assert_eq!(window.announce(&[6]), vec![Prefetch(6)], "asked for again");
}

/// Share of the choices of some steps that were in memory, by layer. Choices follow Zipf's law, by another order of the
/// experts in each layer.
fn hits_by_layer(window: &mut Window, (layers, experts): (usize, usize)) -> Vec<f64> {
    const CHOSEN: usize = 4;
    let mut state = 1u64;
    let mut random = || {
        state = state
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (state >> 33) as usize
    };
    let weights: Vec<usize> = (1..=experts).map(|rank| 1_000_000 / rank).collect();
    let all: usize = weights.iter().sum();
    let mut hits = vec![0.0; layers];
    for step in 0..400 {
        for (layer, hits) in hits.iter_mut().enumerate() {
            let mut chosen: Vec<Index> = Vec::new();
            while chosen.len() < CHOSEN {
                let mut left = random() % all;
                let rank = weights.iter().position(|weight| {
                    let is_it = left < *weight;
                    left = left.saturating_sub(*weight);
                    is_it
                });
                let expert = (rank.unwrap() * 5 + layer * 7) % experts;
                let index = layer * experts + expert;
                if !chosen.contains(&index) {
                    chosen.push(index);
                }
            }
            chosen.sort_unstable();
            let there = chosen
                .iter()
                .filter(|i| window.entries[**i].resident)
                .count();
            if step >= 100 {
                *hits += there as f64 / CHOSEN as f64 / 300.0;
            }
            window.announce(&chosen);
            for index in chosen {
                run(window, index);
            }
        }
    }
    hits
}

#[test]
fn experts_that_are_chosen_most_stay_in_every_layer_also_after_a_prompt() {
    let (layers, experts) = (12, 32);
    let kinds = (0..layers as u32).flat_map(|layer| vec![(Kind::Expert { layer }, 10); experts]);
    let kinds: Vec<(Kind, u64)> = kinds.collect();
    let mut window = Window::new(
        &kinds,
        (layers * experts * 10 / 2) as u64,
        0,
        ReadAhead::Least,
    );
    // A prompt chooses all of them.
    for layer in 0..layers {
        let chosen: Vec<Index> = (layer * experts..(layer + 1) * experts).collect();
        window.announce(&chosen);
        for index in chosen {
            run(&mut window, index);
        }
    }
    let hits = hits_by_layer(&mut window, (layers, experts));
    let least = hits.iter().copied().fold(1.0, f64::min);
    let mean = hits.iter().sum::<f64>() / layers as f64;
    assert!(least > 0.9 * mean && mean > 0.7, "{hits:?}");
}

#[test]
fn experts_are_held_in_groups_that_fit() {
    let mut window = sparse(35);
    run(&mut window, 1);
    run(&mut window, 2);
    window.announce(&[3, 4, 5, 6]);
    assert_eq!(window.group(&[3, 4, 5, 6]), 3);
    window.acquire(2);
    assert_eq!(window.group(&[3, 4, 5, 6]), 2);
    let mut tiny = sparse(5);
    assert_eq!(
        tiny.group(&[3, 4]),
        1,
        "one is always held, whatever the budget"
    );
    tiny.acquire(3);
    assert_eq!(tiny.group(&[4]), 1);
}

proptest! {
    #[test]
    fn the_budget_holds_unless_guards_exceed_it(
        budget in 1u64..120,
        lookahead in 0usize..10,
        steps in prop::collection::vec((0usize..8, any::<bool>()), 1..60),
    ) {
        let mut window = sparse(budget);
        window.lookahead = Some(lookahead);
        let mut resident = [false; 8];
        let mut held = [0usize; 8];
        for (index, acquire) in steps {
            let actions = if acquire {
                held[index] += 1;
                window.acquire(index)
            } else if held[index] > 0 {
                held[index] -= 1;
                window.release(index)
            } else {
                window.announce(&[3 + index % 4])
            };
            for action in actions {
                match action {
                    Prefetch(i) => {
                        prop_assert!(!resident[i], "asked for twice");
                        resident[i] = true;
                    }
                    Release(0) => prop_assert!(held[0] == 0, "given back while held"),
                    Release(i) => {
                        prop_assert!(resident[i] && held[i] == 0, "given back while held");
                        resident[i] = false;
                    }
                }
            }
            let is_counted = |i: &usize| *i != 0;
            let bytes = |set: &dyn Fn(usize) -> bool| 10 * (0..8).filter(is_counted).filter(|i| set(*i)).count() as u64;
            let used = bytes(&|i| resident[i]);
            prop_assert_eq!(used, window.resident_bytes());
            prop_assert!(used <= budget.max(bytes(&|i| held[i] > 0)), "{} bytes", used);
            prop_assert!((1..8).all(|i| held[i] == 0 || resident[i]), "a held module is not there");
        }
    }
}
