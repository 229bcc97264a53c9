//! Groups that have lost a rank: those that are left read on, with the bits of all.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use hearth_kernels::{Backend, BlockId, Span};
use hearth_model::ExpertParallel::{Ep, SmallEp};
use hearth_model::{Batch, ExpertParallel, Membership as _, Observer, Sharing, modules};
use hearth_parallel::{
    Attendance, Follower, Formed, Former, Group, GroupError, GroupPeers, LocalGroup, StageError,
    Wanted,
};

use crate::support::{Files, Head, cache};

const LAYERS: usize = 3;
const RANKS: usize = 4;
const PATIENCE: Duration = Duration::from_secs(20);

/// Which ranks live.
#[derive(Default)]
struct Alive([AtomicBool; RANKS]);

impl Alive {
    fn has(&self, place: usize) -> bool {
        self.0[place].load(Ordering::Relaxed)
    }

    fn set(&self, place: usize, lives: bool) {
        self.0[place].store(lives, Ordering::Relaxed);
    }
}

/// Forms groups of the threads that live.
struct Threads {
    alive: Arc<Alive>,
    attendance: Attendance,
    followers: Mutex<Vec<Sender<Arc<dyn Group>>>>,
}

impl Former for Threads {
    fn form(&self, _: Duration, wanted: &Wanted<'_>) -> Result<Option<Formed>, GroupError> {
        let there: Vec<usize> = (0..RANKS).filter(|place| self.alive.has(*place)).collect();
        let Some(places) = self.attendance.chosen(&there, wanted.fits) else {
            return Ok(None);
        };
        let ranks = places.len();
        let mut groups = LocalGroup::of(ranks).into_iter();
        let group = Arc::new(groups.next().unwrap());
        let followers = self.followers.lock().unwrap();
        for (place, group) in places[1..].iter().zip(groups) {
            followers[place - 1].send(Arc::new(group)).unwrap();
        }
        Ok(Some(Formed {
            group,
            numerics: vec![String::new(); ranks - 1],
            short: (ranks < RANKS).then(|| format!("{ranks} of {RANKS} ranks")),
            places,
        }))
    }
}

/// Kills a rank after some blocks of a pass.
struct Kills<'a>(&'a Alive, usize, usize);

impl<B: Backend> Observer<B> for Kills<'_> {
    fn goes_on(&mut self, done: usize, _: usize) -> bool {
        let Self(alive, place, after) = *self;
        if done >= after {
            alive.set(place, false);
        }
        true
    }
}

/// Runs `with` at a head whose other ranks have all experts, and follow in threads as long as they live.
fn in_groups(files: &Files, how: ExpertParallel, with: impl FnOnce(&mut Head, &Alive)) {
    let alive = Arc::new(Alive::default());
    (0..RANKS).for_each(|place| alive.set(place, true));
    std::thread::scope(|scope| {
        let mut followers = Vec::new();
        for place in 1..RANKS {
            let model = files.with(modules(&files.config).unwrap());
            let kv = cache(&model);
            let sharing = Sharing::new(how, RANKS);
            let mut follower = Follower::new(model, kv, |model, peers| model.share(peers, sharing));
            let (sender, groups): (_, Receiver<Arc<dyn Group>>) = channel();
            followers.push(sender);
            let alive = Arc::clone(&alive);
            scope.spawn(move || {
                for group in groups {
                    match follower.follow(group, || alive.has(place)) {
                        Ok(()) | Err(StageError::Group(_)) => {}
                        Err(error) => panic!("rank {place}: {error}"),
                    }
                }
            });
        }
        let peers = Arc::new(GroupPeers::of_head(Box::new(Threads {
            alive: Arc::clone(&alive),
            attendance: Attendance::new([true; RANKS]),
            followers: Mutex::new(followers),
        })));
        assert!(peers.rejoin(Duration::ZERO).unwrap());
        peers.may_shrink(how);
        let mut model = files.with(modules(&files.config).unwrap());
        let sharing = Sharing {
            is_self_sufficient: true,
            ..Sharing::new(how, RANKS)
        };
        model.share(peers, sharing);
        let kv = cache(&model);
        with(&mut Head { model, kv }, &alive);
        // With the head, the followers' channels end.
    });
}

impl Head {
    /// Waits for the group to be lost, and forms it anew: how many are together, if not all.
    fn regroup(&self) -> Option<String> {
        let begun = Instant::now();
        let group = self.model.group().unwrap();
        while group.lost().is_none() {
            assert!(begun.elapsed() < PATIENCE, "the group goes on");
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(self.model.rejoin(Duration::ZERO).unwrap());
        assert_eq!(self.model.group().unwrap().lost(), None);
        self.model.group().unwrap().short()
    }
}

fn tokens(rows: usize) -> Vec<u32> {
    (0..rows as u32).map(|i| 3 + 5 * i % 29).collect()
}

fn span(start: usize, rows: usize) -> Vec<Span> {
    vec![Span {
        first_row: 0,
        rows,
        start,
        blocks: (0..3).map(BlockId).collect(),
    }]
}

#[test]
fn those_that_are_left_give_the_bits_of_all_and_who_is_back_reads_with_them_again() {
    for (case, how, left) in [("deepseek_v3", SmallEp, 2), ("qwen3_moe", Ep, 3)] {
        let files = Files::of(case, LAYERS);
        let model = files.with(modules(&files.config).unwrap());
        let kv = cache(&model);
        let mut one = Head { model, kv };
        let want = one.chunk(&tokens(24), span(0, 24)).unwrap();
        let want_next = one.chunk(&tokens(9), span(24, 9)).unwrap();
        let short = Some(format!("{left} of {RANKS} ranks"));
        in_groups(&files, how, |head, alive| {
            assert_eq!(head.chunk(&tokens(24), span(0, 24)).unwrap(), want);
            // Between two passes; the others lack what was read before.
            alive.set(2, false);
            assert_eq!(head.regroup(), short, "{case}");
            assert_eq!(head.chunk(&tokens(9), span(24, 9)).unwrap(), want_next);
            alive.set(2, true);
            assert!(head.model.rejoin(Duration::ZERO).unwrap());
            assert_eq!(head.model.group().unwrap().short(), None, "{case}");
            assert_eq!(head.chunk(&tokens(9), span(24, 9)).unwrap(), want_next);
            // In the middle of a pass.
            for after in [1, LAYERS, 2 * LAYERS - 1] {
                let batch = Batch {
                    tokens: tokens(24),
                    spans: span(0, 24),
                    logit_rows: vec![23],
                };
                let mut kills = Kills(alive, 3, after);
                // Its last message may have been all that the others needed of it.
                if let Ok(got) = head.model.forward(&batch, &mut head.kv, &mut kills) {
                    assert_eq!(got, want, "{case}, killed after {after}");
                }
                assert_eq!(head.regroup(), short, "{case}");
                assert_eq!(head.chunk(&tokens(24), span(0, 24)).unwrap(), want);
                alive.set(3, true);
                assert!(head.model.rejoin(Duration::ZERO).unwrap());
                assert_eq!(head.chunk(&tokens(24), span(0, 24)).unwrap(), want);
            }
            // With nobody left, the head is alone.
            (1..RANKS).for_each(|place| alive.set(place, false));
            let begun = Instant::now();
            while head.model.group().unwrap().lost().is_none() {
                assert!(begun.elapsed() < PATIENCE, "the group goes on");
                std::thread::sleep(Duration::from_millis(1));
            }
            assert!(!head.model.rejoin(Duration::ZERO).unwrap());
            assert_eq!(head.chunk(&tokens(24), span(0, 24)).unwrap(), want);
        });
    }
}
