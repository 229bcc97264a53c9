//! Groups of threads that share passes.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use hearth_kernels::Span;
use hearth_kernels::ops::MemoryOps;
use hearth_model::{
    Batch, ExpertParallel, ExpertShare, Membership, ModelError, Part, PassSpec, Rows, Sharing,
    modules, modules_of,
};
use hearth_parallel::{
    Follower, Group, GroupError, GroupPeers, LocalGroup, Message, OneGroup, Op, StageError, Tag,
};

use crate::support::{Files, Head, cache};

/// Bytes by sender, receiver and kind.
pub(crate) type Sent = BTreeMap<(usize, usize, String), usize>;

/// A rank's group that counts what it sends.
struct Counting {
    group: LocalGroup,
    sent: Arc<Mutex<Sent>>,
}

impl Group for Counting {
    fn rank(&self) -> usize {
        self.group.rank()
    }

    fn size(&self) -> usize {
        self.group.size()
    }

    fn name(&self, rank: usize) -> String {
        self.group.name(rank)
    }

    fn send(&self, to: usize, tag: Tag, bytes: Vec<u8>) -> Result<(), GroupError> {
        let kind = match tag.op {
            Op::Exchange(what) => format!("{what:?}"),
            op => format!("{op:?}"),
        };
        let key = (self.rank(), to, kind);
        *self.sent.lock().unwrap().entry(key).or_default() += bytes.len();
        self.group.send(to, tag, bytes)
    }

    fn recv(
        &self,
        from: usize,
        tag: Tag,
        patience: Duration,
    ) -> Result<Option<Vec<u8>>, GroupError> {
        self.group.recv(from, tag, patience)
    }

    fn next(&self, op: Op, patience: Duration) -> Result<Option<Message>, GroupError> {
        self.group.next(op, patience)
    }

    fn forget(&self, before_pass: u64) {
        self.group.forget(before_pass);
    }

    fn lost(&self) -> Option<GroupError> {
        self.group.lost()
    }

    fn lose(&self, member: usize, why: &str) {
        self.group.lose(member, why);
    }
}

/// What a group computes, each rank in a thread.
pub(crate) fn run_group(files: &Files, ranks: usize, how: ExpertParallel) -> Vec<u32> {
    in_group(files, (ranks, how), |head, _| head.answers().unwrap()).0
}

/// Runs `with` at the head of a group whose other ranks follow in threads until it returns; returns also what was sent.
pub(crate) fn in_group<R>(
    files: &Files,
    (ranks, how): (usize, ExpertParallel),
    with: impl FnOnce(&mut Head, &dyn Group) -> R,
) -> (R, Sent) {
    share(files, Sharing::new(how, ranks), with)
}

/// The same with a head that may be able to compute alone.
pub(crate) fn share<R>(
    files: &Files,
    sharing: Sharing,
    with: impl FnOnce(&mut Head, &dyn Group) -> R,
) -> (R, Sent) {
    let Sharing { experts, ranks, .. } = sharing;
    let is_over = AtomicBool::new(false);
    let sent = Arc::new(Mutex::new(Sent::new()));
    let mut progress = Vec::new();
    let result = std::thread::scope(|scope| {
        let groups = LocalGroup::of(ranks).into_iter().map(|group| {
            let sent = Arc::clone(&sent);
            Arc::new(Counting { group, sent }) as Arc<dyn Group>
        });
        let mut groups: Vec<Arc<dyn Group>> = groups.collect();
        let group = groups.remove(0);
        for (rank, group) in (1..).zip(groups) {
            let all = modules(&files.config).unwrap();
            let model = files.with(modules_of(ExpertShare::of(rank, ranks), all));
            let kv = cache(&model);
            let sharing = Sharing::new(experts, ranks);
            let mut follower = Follower::new(model, kv, |model, peers| model.share(peers, sharing));
            progress.push(follower.progress());
            let goes_on = || !is_over.load(Ordering::Relaxed);
            scope.spawn(move || match follower.follow(group, goes_on) {
                Ok(()) | Err(StageError::Group(_)) => {}
                Err(error) => panic!("rank {rank}: {error}"),
            });
        }
        let peers = GroupPeers::of_head(Box::new(OneGroup(Arc::clone(&group))));
        assert!(peers.rejoin(Duration::ZERO).unwrap());
        let all = Part::whole(files.config.layers).of(modules(&files.config).unwrap());
        let own = match sharing.is_self_sufficient {
            true => ExpertShare::ALL,
            false => ExpertShare::of(0, ranks),
        };
        let mut model = files.with(modules_of(own, all));
        model.share(Arc::new(peers), sharing);
        let kv = cache(&model);
        let mut head = Head { model, kv };
        let result = with(&mut head, &*group);
        // A follower may be at the last pass still.
        let deadline = Instant::now() + Duration::from_secs(20);
        let is_busy = || progress.iter().any(|p| p.at_window_for().is_some());
        while group.lost().is_none() && is_busy() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
        is_over.store(true, Ordering::Relaxed);
        // With the head's group, every wait of the others ends.
        drop((head, group));
        result
    });
    let sent = std::mem::take(&mut *sent.lock().unwrap());
    (result, sent)
}

impl Head {
    /// Logits of the last row of a pass that this rank computes alone, if it can.
    pub(crate) fn chunk_alone(
        &mut self,
        tokens: &[u32],
        spans: &[Span],
    ) -> Result<Vec<f32>, ModelError> {
        let pass = PassSpec {
            spans,
            logit_rows: &[tokens.len() as u32 - 1],
            alone: true,
        };
        let rows = Rows::Tokens(tokens);
        let logits = self.model.forward_rows(rows, pass, &mut self.kv, &mut ())?;
        let logits = logits.expect("logits of one row");
        Ok(self.model.backend().download(&logits)?)
    }

    /// Logits of the last row of one step.
    pub(crate) fn chunk(
        &mut self,
        tokens: &[u32],
        spans: Vec<Span>,
    ) -> Result<Vec<f32>, ModelError> {
        let batch = Batch {
            tokens: tokens.to_vec(),
            spans,
            logit_rows: vec![tokens.len() as u32 - 1],
        };
        self.model.forward(&batch, &mut self.kv, &mut ())
    }
}
