//! A ring of processes: it answers as one process does, and a member that dies costs seconds and no token.

mod faults;
mod given_up;
mod harness;
mod planned;
mod steps;

use std::cell::Cell;
use std::fs::Permissions;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::process::Stdio;
use std::time::{Duration, Instant};

use harness::{
    AGAIN, Ring, answers, answers_that_begin, dense_model, dense_model_of, expected, expected_of,
    streams, wait_until,
};
use hearth_tests::{RING_MEMBERS, RingMember, Up, UpOptions, hearth, root, run, worker};
use rustix::process::Signal;
use serde_json::{Value, json};

/// Time that a process gets for its answers once it is told to end, by default.
const GRACE: Duration = Duration::from_secs(30);
/// Longest time until a head that is told to end has done so where it has lost a member for good: some more than it waits for the
/// member, on a busy machine.
const LONGEST_DRAIN: Duration = Duration::from_secs(45);

const TWO_IN_TWO_ROUNDS: [RingMember; 2] = [
    ("decode", "decode-0", &[[0, 1], [2, 1]]),
    ("stage", "stage-0", &[[1, 1], [3, 1]]),
];

#[tokio::test]
async fn a_ring_answers_as_one_process_and_loses_nothing_when_members_die() {
    let want = expected(0..8).await;
    let mut ring = Ring::start();
    assert_eq!(answers(&ring.gateway, 0..8).await, want);

    for place in [1, 2, 0, 1] {
        let name = RING_MEMBERS[place].1;
        let begun = Instant::now();
        let joins_before = ring.members[0].output().matches(AGAIN).count();
        let mut victim = ring.members.remove(place);
        // In the middle of answers: when the last of them has begun.
        let (begins, mut all_begun) = tokio::sync::mpsc::unbounded_channel();
        let asked = answers_that_begin(&ring.gateway, 0..8, |number| {
            // After the last one nobody listens.
            let _ = begins.send(number);
        });
        let restarted = async {
            for _ in 0..8 {
                all_begun.recv().await;
            }
            victim.signal(Signal::KILL);
            // Its successor listens on the same port.
            victim.wait();
            ring.process(place, &[])
        };
        let (got, member) = tokio::join!(asked, restarted);
        println!(
            "{name} was killed among 8 answers, which took {:?}",
            begun.elapsed()
        );
        assert_eq!(got, want, "{name}");
        ring.members.insert(place, member);
        // The head that is there now has seen it, unless it is the one that died.
        let joins = ring.members[0].output().matches(AGAIN).count();
        assert!(place == 0 || joins > joins_before, "{name}: {joins} joins");
    }
}

#[tokio::test]
async fn rings_of_two_and_of_four_answer_as_one_process() {
    let want = expected(0..8).await;
    let rings: [&'static [RingMember]; 3] = [
        &[
            ("decode", "decode-0", &[[0, 3]]),
            ("stage", "stage-0", &[[3, 1]]),
        ],
        &TWO_IN_TWO_ROUNDS,
        &[
            ("decode", "decode-0", &[[0, 1]]),
            ("stage", "stage-0", &[[1, 1]]),
            ("stage", "stage-1", &[[2, 1]]),
            ("stage", "stage-2", &[[3, 1]]),
        ],
    ];
    for members in rings {
        let mut ring = Ring::start_of(members, |_| {});
        assert_eq!(answers(&ring.gateway, 0..8).await, want, "{members:?}");
        let last = members.len() - 1;
        ring.kill(last);
        ring.members[last] = ring.process(last, &[]);
        assert_eq!(answers(&ring.gateway, 0..8).await, want, "{members:?}");
    }
}

#[tokio::test]
async fn rings_of_two_and_of_four_rounds_answer_as_one_process() {
    let directory = tempfile::tempdir().expect("a directory");
    let model = dense_model_of(8, directory.path());
    let of_model = |plan: &mut Value| {
        (plan["model"]["path"], plan["model"]["layers"]) = (json!(model), json!(8));
    };
    let want = expected_of(of_model, 0..8).await;
    let rings: [&'static [RingMember]; 2] = [
        &[
            ("decode", "decode-0", &[[0, 1], [2, 1], [4, 1], [6, 1]]),
            ("stage", "stage-0", &[[1, 1], [3, 1], [5, 1], [7, 1]]),
        ],
        &[
            ("decode", "decode-0", &[[0, 1], [4, 1]]),
            ("stage", "stage-0", &[[1, 1], [5, 1]]),
            ("stage", "stage-1", &[[2, 1], [6, 1]]),
            ("stage", "stage-2", &[[3, 1], [7, 1]]),
        ],
    ];
    for members in rings {
        let mut ring = Ring::start_of(members, of_model);
        assert_eq!(answers(&ring.gateway, 0..8).await, want, "{members:?}");
        ring.kill(1);
        ring.members[1] = ring.process(1, &[]);
        assert_eq!(answers(&ring.gateway, 0..8).await, want, "{members:?}");
    }
}

/// As the planner has it for a node's GPU: a member of its own, beside the one on the CPUs.
#[tokio::test]
async fn a_member_may_have_its_layers_on_a_device() {
    let want = expected(0..4).await;
    let mut ring = Ring::start_with(
        |plan| {
            let stage = &mut plan["ranks"][1];
            stage["device"] = json!("VIRTUAL-0");
            stage["gpuUuids"] = json!(["VIRTUAL-0"]);
            stage["gpuMemoryBytes"] = json!(256_u64 << 20);
            stage["virtualDevice"] = json!("virtual:memory=256Mi");
        },
        &[],
    );
    assert_eq!(answers(&ring.gateway, 0..4).await, want);
    ring.members[1].signal(Signal::KILL);
    ring.members[1].wait();
    ring.members[1] = ring.process(1, &[]);
    assert_eq!(answers(&ring.gateway, 0..4).await, want);
}

/// As the planner has it where no node has memory for its layers: the demo's experts, and dense layers half of which stay.
#[tokio::test]
async fn members_that_read_their_weights_for_each_token_answer_as_one_process() {
    let directory = tempfile::tempdir().expect("a directory");
    let dense = dense_model(directory.path());
    let demo = root().join("models/hearth-demo");
    for (model, budgets) in [
        (demo, [1_500_000, 1_200_000]),
        (dense, [2_700_000, 1_700_000]),
    ] {
        let of_model = |plan: &mut Value| plan["model"]["path"] = json!(model);
        let want = expected_of(of_model, 0..4).await;
        let mut ring = Ring::start_of(&TWO_IN_TWO_ROUNDS, |plan| {
            of_model(plan);
            let ranks = plan["ranks"].as_array_mut().into_iter().flatten();
            for (rank, budget_bytes) in ranks.zip(budgets) {
                rank["residency"] = json!({
                    "policy": "MmapPrefetch", "weightBytes": 2 * budget_bytes, "budgetBytes": budget_bytes,
                });
            }
        });
        assert_eq!(answers(&ring.gateway, 0..4).await, want, "{model:?}");
        for place in [1, 0] {
            let mut victim = ring.members.remove(place);
            let (begins, mut begun) = tokio::sync::mpsc::unbounded_channel();
            let asked = answers_that_begin(&ring.gateway, 0..4, |number| {
                // After the first one nobody listens.
                let _ = begins.send(number);
            });
            let restarted = async {
                begun.recv().await;
                victim.signal(Signal::KILL);
                victim.wait();
                ring.process(place, &[])
            };
            let (got, member) = tokio::join!(asked, restarted);
            assert_eq!(got, want, "{model:?}: {place}");
            ring.members.insert(place, member);
        }
    }
}

#[tokio::test]
async fn a_member_that_dies_while_nothing_is_asked_is_back_before_the_next_question() {
    let want = expected(0..2).await;
    let mut ring = Ring::start();
    ring.members[2].signal(Signal::KILL);
    ring.members[2].wait();
    let head = &ring.members[0];
    wait_until("the head misses it", || {
        head.output().contains("not complete")
    });
    assert!(head.output().contains("stage-1"), "{}", head.output());
    ring.members[2] = ring.process(2, &[]);
    let head = &ring.members[0];
    wait_until("the ring is complete", || head.output().contains(AGAIN));
    assert_eq!(answers(&ring.gateway, 0..2).await, want);
}

#[tokio::test]
async fn members_join_rings_of_later_plans_as_long_as_their_own_layers_stay() {
    let want = expected(0..1).await;
    let mut ring = Ring::start();
    let restart = |ring: &mut Ring, place: usize| {
        ring.members[place].signal(Signal::KILL);
        ring.members[place].wait();
        ring.members[place] = ring.process(place, &[]);
    };
    // The stages keep the plan before.
    ring.plan["generation"] = json!(77);
    restart(&mut ring, 0);
    assert_eq!(answers(&ring.gateway, 0..1).await, want);

    ring.plan["ranks"][1]["ring"]["windows"] = json!([{"firstLayer": 1, "layers": 2}]);
    restart(&mut ring, 1);
    let head = &ring.members[0];
    wait_until("the head says what differs", || {
        let output = head.output();
        output.contains("stage-0")
            && output.contains("its task: layers 1-2, and the head wants layers 1-1")
    });
}

#[tokio::test]
async fn stages_that_are_told_to_end_wait_for_their_head() {
    let want = expected(0..4).await;
    let mut ring = Ring::start();
    // Whoever is told to end takes no new request.
    let begun = Cell::new(0);
    let stop_all = |_| {
        begun.set(begun.get() + 1);
        if begun.get() == 4 {
            for member in &ring.members {
                member.signal(Signal::TERM);
            }
        }
    };
    assert_eq!(
        answers_that_begin(&ring.gateway, 0..4, stop_all).await,
        want
    );
    assert_eq!(begun.get(), 4);
    let drained = Instant::now();
    for member in &mut ring.members {
        assert!(member.wait().success(), "{}", member.name);
    }
    // Nobody waits for the end of the grace period.
    assert!(drained.elapsed() < GRACE / 2, "{:?}", drained.elapsed());
}

#[tokio::test]
async fn a_stage_that_is_told_to_end_alone_makes_room_for_its_successor() {
    let want = expected(0..8).await;
    let mut ring = Ring::start();
    let mut leaver = ring.members.remove(2);
    let (begins, mut all_begun) = tokio::sync::mpsc::unbounded_channel();
    let asked = answers_that_begin(&ring.gateway, 0..8, |number| {
        // After the last one nobody listens.
        let _ = begins.send(number);
    });
    let replaced = async {
        for _ in 0..8 {
            all_begun.recv().await;
        }
        leaver.signal(Signal::TERM);
        let told = Instant::now();
        let ended = tokio::task::spawn_blocking(move || leaver.wait()).await;
        assert!(ended.expect("a wait").success());
        (told.elapsed(), ring.process(2, &[]))
    };
    let (got, (took, member)) = tokio::join!(asked, replaced);
    ring.members.push(member);
    assert!(took < GRACE / 2, "it took {took:?}");
    assert_eq!(got, want);
}

/// As where a member's node is gone and another plan follows: the head is told to end, and another worker is there.
#[tokio::test]
async fn a_head_that_is_told_to_end_leaves_its_answers_to_others_once_a_member_stays_lost() {
    let want = expected(0..4).await;
    // As in a Pod.
    let mut ring = Ring::start_with(|_| {}, &["--grace", "120"]);
    let mut other = ring.ranks.start("decode", "decode-1", &[]);
    other.wait_until_ready();
    let mut head = ring.members.remove(0);
    let (begins, mut all_begun) = tokio::sync::mpsc::unbounded_channel();
    let asked = answers_that_begin(&ring.gateway, 0..4, |number| {
        // After the last one nobody listens.
        let _ = begins.send(number);
    });
    let drained = async {
        for _ in 0..4 {
            all_begun.recv().await;
        }
        ring.members[0].signal(Signal::KILL);
        head.signal(Signal::TERM);
        let told = Instant::now();
        ring.ranks.route_to(&[&head, &other]);
        let ended = tokio::task::spawn_blocking(move || (head.wait(), head)).await;
        let (status, head) = ended.expect("a wait");
        assert!(status.success());
        (told.elapsed(), head.output())
    };
    let (got, (took, log)) = tokio::join!(asked, drained);
    assert_eq!(got, want);
    println!("the head ended after {took:.1?}");
    assert!(took < LONGEST_DRAIN, "{took:?}");
    // One that hangs is back sooner.
    assert!(took > Duration::from_secs(25), "{took:?}");
    let said = log.lines().find(|line| line.contains("are left to other"));
    let said = said.unwrap_or_else(|| panic!("{log}"));
    assert!(said.contains("member=\"stage-0\""), "{said}");
}

/// The example of a ring, whose members are `decode-0`, `stage-0` and `stage-1`.
fn on_three_nodes() -> UpOptions {
    let nodes = [
        "attic:memory=420Mi",
        "cellar:memory=350Mi",
        "office:memory=300Mi",
    ];
    UpOptions {
        file: Some(root().join("manifests/examples/demo-ring.yaml")),
        arguments: nodes
            .iter()
            .flat_map(|node| ["--node".to_owned(), (*node).to_owned()])
            .collect(),
        ..UpOptions::default()
    }
}

#[tokio::test]
async fn hearth_up_runs_a_ring_on_one_machine_that_stands_for_three() {
    let want = expected(0..4).await;
    let up = Up::start(&on_three_nodes());
    for rank in ["gateway-0", "decode-0", "stage-0", "stage-1"] {
        assert!(up.pid(rank) > 0);
    }
    assert_eq!(streams(&up.v1(), 0..4, |_| {}).await, want);
    for rank in ["stage-1", "decode-0"] {
        let begun = Cell::new(0);
        let kill = |_| {
            begun.set(begun.get() + 1);
            if begun.get() == 2 {
                up.signal(rank, Signal::KILL);
            }
        };
        assert_eq!(streams(&up.v1(), 0..4, kill).await, want, "{rank}");
    }
}

#[test]
fn hearth_chat_and_hearth_status_say_which_member_answers_wait_for() {
    let up = Up::start(&on_three_nodes());
    let of_up = |command: &str| {
        let mut hearth = hearth();
        hearth.arg(command).arg("--state-dir").arg(up.state_dir());
        hearth
    };
    let table = || run(&mut of_up("status")).1;
    assert!(!table().contains("waits for"), "{}", table());
    up.signal("stage-0", Signal::STOP);
    let mut chat = of_up("chat");
    chat.args(["--message", "What is Hearth?"]);
    chat.stdin(Stdio::null()).stdout(Stdio::piped());
    let mut chat = chat.stderr(Stdio::piped()).spawn().expect("hearth chat");
    // As soon as its process is shown as hung, the endpoint is not shown as ready.
    let mut status = json!(null);
    wait_until("it hangs", || {
        status = up.status();
        let mut processes = status["processes"].as_array().into_iter().flatten();
        processes.any(|it| it["rank"] == "stage-0" && it["hung"] == true)
    });
    assert_eq!(status["serving"], false, "{status:#}");
    assert_eq!(status["ready"], false, "{status:#}");
    let mut processes = status["processes"].as_array().into_iter().flatten();
    let stage = processes.find(|it| it["rank"] == "stage-0").expect("it");
    assert_eq!(stage["state"], "Hung", "{status:#}");
    for place in ["node", "layers"] {
        assert!(stage[place].is_string(), "{status:#}");
    }
    let waits_for = status["waitsFor"].as_array().expect("names");
    assert!(waits_for.contains(&json!("stage-0")), "{status:#}");
    let said = BufReader::new(chat.stderr.take().expect("what it says")).lines();
    let mut said = said.map_while(Result::ok);
    // It ends with an error if nobody comes back.
    assert!(said.any(|line| line.ends_with("the answer waits for stage-0")));
    assert_eq!(up.status()["waitsFor"], json!(["stage-0"]));
    assert!(table().contains("False: waits for stage-0"), "{}", table());
    assert!(in_state(&table(), "stage-0", "Hung"), "{}", table());

    up.signal("stage-0", Signal::CONT);
    let answer = chat.wait_with_output().expect("an answer");
    assert!(answer.status.success(), "{}", up.logs());
    assert!(!answer.stdout.trim_ascii().is_empty());
    wait_until("nobody is waited for", || {
        let status = up.status();
        status["waitsFor"] == json!([]) && status["ready"] == true
    });
    assert!(!table().contains("waits for"), "{}", table());

    let named = |name: &str| run(of_up("status").arg(name));
    let (code, detail, _) = named("demo-ring");
    assert_eq!(code, 0);
    for rank in ["gateway-0", "decode-0", "stage-0", "stage-1"] {
        assert!(in_state(&detail, rank, "Ready"), "{detail}");
    }
    let (code, _, error) = named("nobody");
    assert_eq!(code, 1);
    assert!(
        error.contains("nobody does not run here; these do: demo-ring"),
        "{error}"
    );
}

/// Whether a table of workers shows one in a state.
fn in_state(table: &str, rank: &str, state: &str) -> bool {
    let words = |line: &str| {
        line.split_whitespace()
            .map(str::to_owned)
            .collect::<Vec<_>>()
    };
    let mut rows = table.lines().map(words);
    rows.any(|row| {
        row.first().is_some_and(|first| first == rank) && row.iter().any(|word| word == state)
    })
}

/// One that is stopped, before it is known to hang.
#[test]
fn who_does_not_end_at_ctrl_c_is_named() {
    let mut up = Up::start(&on_three_nodes());
    up.signal("stage-1", Signal::STOP);
    up.signal_up(Signal::INT);
    assert_eq!(up.wait(), 0);
    let output = up.output();
    assert!(
        output.contains("stopping waits for stage-1, which does not answer"),
        "{output}"
    );
}

#[test]
fn hearth_status_names_the_members_of_a_ring_before_it_serves() {
    let directory = tempfile::tempdir().expect("directory");
    let script = directory.path().join("worker");
    let real = worker().get_program().to_string_lossy().into_owned();
    let text = format!(
        "#!/bin/sh\ncase \"$*\" in *'--rank stage-1 '*) exec sleep 600;; esac\nexec '{real}' \"$@\"\n"
    );
    std::fs::write(&script, text).expect("the script");
    std::fs::set_permissions(&script, Permissions::from_mode(0o755)).expect("a program");
    let up = Up::spawn(&UpOptions {
        environment: vec![("HEARTH_WORKER".to_owned(), script.display().to_string())],
        ..on_three_nodes()
    });
    let table = || {
        let mut status = hearth();
        status.arg("status").arg("--state-dir").arg(up.state_dir());
        run(&mut status).1
    };
    for state in ["Starting", "Silent"] {
        wait_until(state, || in_state(&table(), "stage-1", state));
        let table = table();
        assert!(table.contains("False: waits for stage-"), "{table}");
        assert!(in_state(&table, "decode-0", "Starting"), "{table}");
    }
    assert!(in_state(&table(), "stage-0", "Ready"), "{}", table());
    let silent = up.status();
    assert_eq!(silent["ready"], false, "{silent:#}");
    assert_eq!(silent["waitsFor"], json!(["stage-1"]), "{silent:#}");

    let mut chat = hearth();
    chat.args(["chat", "--message", "What is Hearth?", "--state-dir"]);
    chat.arg(up.state_dir()).stdin(Stdio::null());
    chat.stdout(Stdio::null()).stderr(Stdio::piped());
    let mut chat = chat.spawn().expect("hearth chat");
    let said = BufReader::new(chat.stderr.take().expect("what it says")).lines();
    let mut said = said.map_while(Result::ok);
    assert!(said.any(|line| line.ends_with("the answer waits for stage-1")));
    chat.kill().expect("its end");
    chat.wait().expect("its end");
}
