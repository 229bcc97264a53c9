//! A ring over a network as it is at home: packets are late, lost and out of order, a link is suddenly slow, and clocks jump.

use hearth_tests::{Ranks, Vm, root, skipped};
use serde_json::json;

/// Asks questions, some of them twice, and prints the answers' texts.
const SCRIPT: &str = r#"
# The shell prefers those of busybox to others of their names.
ip=/usr/sbin/ip
tc=/usr/sbin/tc
uptime_s() {
    cut -d ' ' -f 1 /proc/uptime
}
during() { # NAME QUESTION COMMAND...: while it is answered
    name=$1
    question=$2
    shift 2
    (sleep 0.5; "$@"; echo "DISTURBS $name $(uptime_s)") &
    disturbs=$!
    ask $name $question
    wait $disturbs
}
jumps() {
    jump 86400
    sleep 0.3
    jump -172800
}
start_head() {
    hearth-worker decode --plan /ring.json --rank decode-0 >> /decode-0.log 2>&1 &
}
start_stage() { # NAME
    $ip netns exec far hearth-worker stage --plan /ring.json --rank $1 >> /$1.log 2>&1 &
}
ask() { # NAME QUESTION
    echo "BEGINS $1 $(uptime_s)"
    since=$(cut -d . -f 1 /proc/uptime)
    # Longer than the gateway waits for workers before it says that there are none.
    until timeout 150 wget -q -O /answer --header 'Content-Type: application/json' --post-file /$2.json http://127.0.0.1:8000/v1/completions; do
        now=$(cut -d . -f 1 /proc/uptime)
        [ $((now - since)) -lt 240 ] || { echo "NO ANSWER $1 $(uptime_s)"; ps; tail -n 500 /*.log; exit 1; }
        sleep 1
    done
    echo "ANSWER $1 $(grep -o '"text":"[^"]*"' /answer)"
    echo "ENDS $1 $(uptime_s)"
}
shape() { # the way to the stages, and back
    # A changed netem keeps what it is not told anew.
    $tc qdisc del dev near root 2> /dev/null || true
    $tc qdisc add dev near root netem "$@"
    $ip netns exec far $tc qdisc del dev end root 2> /dev/null || true
    $ip netns exec far $tc qdisc add dev end root netem "$@"
}
crawls() {
    shape rate 40kbit
    sleep 20
    shape delay 1ms
}
tell() { # NAME: what members have said since it was told last, but for their signs of life
    for log in /decode-0.log /stage-0.log /stage-1.log; do
        sed "/\"event\":\"alive\"/d; s/^/$1 /" $log
        : > $log
    done
}
jump() { # SECONDS
    date -s "@$(($(date +%s) + $1))" > /dev/null
}
watches() { # tells how long the machine stood still, which is nobody's fault
    last=$(cut -d . -f 1 /proc/uptime)
    while sleep 0.5; do
        now=$(cut -d . -f 1 /proc/uptime)
        [ $((now - last)) -lt 3 ] || echo "STOOD STILL $((now - last)) s until $now"
        last=$now
    done
}
watches &
# The head and the gateway are on one node, the stages on another.
mkdir -p /var/run
$ip netns add far
$ip link add near type veth peer name end netns far
$ip address add 10.0.0.1/24 dev near
$ip link set near up
$ip -n far address add 10.0.0.2/24 dev end
$ip -n far link set end up
$ip -n far link set lo up
start_head
head=$!
start_stage stage-0
start_stage stage-1
stage=$!
hearth-worker gateway --plan /gateway.json --rank gateway-0 --routes /routes.json > /gateway.log 2>&1 &
ask calm first
shape delay 10ms 8ms 25% loss 5% reorder 25% 50%
ask disturbed first
$tc -s qdisc show dev near | grep -o 'dropped [0-9]*'
shape rate 25mbit
# What the rows of a long prompt usually take.
usual_from=$(cut -d . -f 1 /proc/uptime)
ask usual fourth
usual_s=$(($(cut -d . -f 1 /proc/uptime) - usual_from))
# Messages then take some tenths of a second over any link, and one of 250 kbit/s is not ten times as slow.
[ $usual_s -lt 40 ] || echo "BUSY: $usual_s s instead of some 20 s"
tell USUAL
during slow second shape rate 250kbit
# What has been slow is told anew once it has not been for 5 s.
sleep 6
named=$(cat /*.log | grep -c ': slow: the way from ' || true)
tell SLOW
if [ $named = 0 ] && [ $usual_s -lt 40 ]; then
    # Where others keep the machine busy, messages usually take so long that this is not ten times as long.
    during slower fifth shape rate 150kbit
    sleep 6
    tell SLOWER
fi
during crawled third crawls
tell CRAWLED
during jumped first jumps
tell JUMPED

# A head that starts again numbers its groups by a clock that is days behind what one member knows and another one, new, does not.
kill -9 $head $stage
# Only then are their ports free for the next ones.
wait $head $stage || true
jump -172800
start_head
start_stage stage-1
ask again first
ask second second
ask third third
"#;

/// Rows of a flight: few, so that a way has rows to carry all the time, also where a busy machine computes slowly. A way that rests
/// for 5 s at a time is not what a prompt waits for, and is not named.
const FLIGHT_TOKENS: u32 = 16;

#[test]
fn a_ring_answers_alike_over_bad_links_and_through_jumps_of_the_clock() {
    if let Some(why) = Vm::unavailable() {
        skipped(&why);
        return;
    }
    let ranks = Ranks::of_demo();
    let endpoints = ["10.0.0.1:9000", "10.0.0.2:9001", "10.0.0.2:9002"].map(str::to_owned);
    let mut plan = ranks.ring_plan(&endpoints);
    plan["model"]["path"] = json!("/model");
    for rank in plan["ranks"].as_array_mut().into_iter().flatten() {
        rank["ring"]["flightTokens"] = json!(FLIGHT_TOKENS);
    }
    let mut gateway = ranks.plan_of("gateway", "gateway-0", "127.0.0.1:8000");
    gateway["model"]["path"] = json!("/model");
    let routes = json!({"workers": [
        {"name": "decode-0", "role": "Decode", "endpoint": endpoints[0]},
    ]});
    let [first, second, third, fourth, fifth] = questions();
    let output = Vm::default()
        .memory_mib(2048)
        .worker()
        .module("sch_netem")
        .module("veth")
        .file("/usr/sbin/ip", "/usr/sbin/ip")
        .file("/usr/sbin/tc", "/usr/sbin/tc")
        .file(root().join("models/hearth-demo"), "/model")
        .json(&plan, "/ring.json")
        .json(&gateway, "/gateway.json")
        .json(&routes, "/routes.json")
        .json(&first, "/first.json")
        .json(&second, "/second.json")
        .json(&third, "/third.json")
        .json(&fourth, "/fourth.json")
        .json(&fifth, "/fifth.json")
        .run(SCRIPT);
    println!("{output}");
    let answer = |name: &str| {
        let start = format!("ANSWER {name} ");
        let line = output.lines().find_map(|line| line.strip_prefix(&start));
        line.unwrap_or_else(|| panic!("no {start}above"))
    };
    assert!(answer("calm").len() > 40);
    for (name, same) in [
        ("calm", "disturbed"),
        ("calm", "jumped"),
        ("calm", "again"),
        ("second", "slow"),
        ("third", "crawled"),
    ] {
        assert!(answer(name).len() > 24, "{name}");
        assert_eq!(answer(name), answer(same), "{name} and {same}");
    }
    assert!(!output.contains("dropped 0\n"), "no packet was lost");
    let when = |what: &str, name: &str| -> f64 {
        let start = format!("{what} {name} ");
        let line = output.lines().find_map(|line| line.strip_prefix(&start));
        let time = line.and_then(|time| time.trim().parse().ok());
        time.unwrap_or_else(|| panic!("no {start}above"))
    };
    for name in ["slow", "crawled", "jumped"] {
        let moments = ["BEGINS", "DISTURBS", "ENDS"].map(|what| when(what, name));
        assert!(moments.is_sorted(), "{name}: {moments:?}");
    }
    assert_slow_and_lost(&output, &endpoints);
}

/// A way that drops to a hundredth is named, and loses nobody. Over one that carries 40 kbit/s of everybody's messages, signs of
/// life may be late.
fn assert_slow_and_lost(output: &str, endpoints: &[String]) {
    let told = |section: &str, what: &str| {
        let of_section = output.lines().filter(|line| line.starts_with(section));
        of_section.filter(|line| line.contains(what)).count()
    };
    let (slow, lost) = (": slow: the way from ", "is lost");
    let of_slow = told("SLOW ", slow) + told("SLOWER ", slow);
    match output.contains("BUSY: ") {
        true => skipped("the machine is busy: whether a slow way is named is not judged"),
        false => assert!(of_slow > 0, "no slow way was named"),
    }
    let of_crawled = told("CRAWLED ", slow) + told("CRAWLED ", lost);
    assert!(of_crawled > 0, "nothing was said of a way that crawled");
    match output.contains("STOOD STILL") {
        true => println!("the machine stood still: who was lost meanwhile is not judged"),
        false => {
            assert_eq!(told("SLOW ", lost), 0, "a slow way cost a member");
            assert_eq!(
                told("JUMPED ", lost),
                0,
                "a jump of the clock cost a member"
            );
        }
    }
    let lines = output.lines();
    let of_links = ["SLOW ", "SLOWER ", "CRAWLED "];
    let of_links = lines.filter(|line| of_links.iter().any(|of| line.starts_with(of)));
    of_links.for_each(|line| assert_members_are_named(line, endpoints));
}

/// Whom a line tells lost, or the way that it tells slow, is told with name and address.
fn assert_members_are_named(line: &str, endpoints: &[String]) {
    let ends_with_a_member = |text: &str| {
        let members = ["decode-0", "stage-0", "stage-1"].iter().zip(endpoints);
        let mut told = members.filter_map(|(name, at)| {
            let before = text.strip_suffix(&format!("({at})"))?;
            Some((name, before))
        });
        told.any(|(name, before)| before.contains(name))
    };
    if let Some((before, _)) = line.split_once(" is lost to its group") {
        assert!(ends_with_a_member(before), "nobody is named: {line}");
    }
    if let Some((_, way)) = line.split_once(": slow: the way from ") {
        let (from, to) = way.split_once(" to ").unwrap_or_default();
        let to = to.split(": ").next().unwrap_or_default();
        let names_both = ends_with_a_member(from) && ends_with_a_member(to);
        assert!(names_both, "no way is named: {line}");
    }
}

/// Requests with their own prompts.
fn questions() -> [serde_json::Value; 5] {
    let body = |(prompt, max_tokens): (String, u32)| {
        json!({
            "model": "hearth-demo", "prompt": prompt, "max_tokens": max_tokens,
            "temperature": 1, "seed": 7, "ignore_eos": true,
        })
    };
    // The rows of long prompts, which nobody has read yet, travel over slow links.
    let asked = [
        ("What is Hearth? ".repeat(8), 32),
        ("Who reads the plan? ".repeat(60), 12),
        ("Where are its layers? ".repeat(12), 12),
        ("When is it ready? ".repeat(60), 12),
        ("What is it made of? ".repeat(60), 12),
    ];
    asked.map(body)
}
