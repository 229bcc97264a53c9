//! A ring over a network as it is at home: packets are late, lost and out of order, a link is suddenly slow, and clocks jump.

use hearth_tests::{Ranks, Vm, root, skipped};
use serde_json::json;

/// Asks the same question each time, and prints the answer's text.
const SCRIPT: &str = r#"
uptime_s() {
    cut -d ' ' -f 1 /proc/uptime
}
during() { # NAME COMMAND...: while it is answered
    name=$1
    shift
    (sleep 0.5; "$@"; echo "DISTURBS $name $(uptime_s)") &
    disturbs=$!
    ask $name
    wait $disturbs
}
jumps() {
    jump 86400
    sleep 0.3
    jump -172800
}
member() { # ROLE NAME
    hearth-worker $1 --plan /ring.json --rank $2 >> /$2.log 2>&1 &
}
ask() { # NAME
    echo "BEGINS $1 $(uptime_s)"
    waited=0
    until wget -q -O /answer --header 'Content-Type: application/json' --post-file /body.json http://127.0.0.1:8000/v1/completions; do
        sleep 1
        waited=$((waited + 1))
        [ $waited -lt 120 ] || { cat /*.log; exit 1; }
    done
    echo "ANSWER $1 $(grep -o '"text":"[^"]*"' /answer)"
    echo "ENDS $1 $(uptime_s)"
}
shape() {
    /usr/sbin/tc qdisc del dev lo root 2> /dev/null || true
    /usr/sbin/tc qdisc add dev lo root netem "$@"
}
crawls() {
    shape rate 40kbit
    sleep 15
    shape delay 1ms
}
jump() { # SECONDS
    date -s "@$(($(date +%s) + $1))" > /dev/null
}
member decode decode-0
head=$!
member stage stage-0
member stage stage-1
stage=$!
hearth-worker gateway --plan /gateway.json --rank gateway-0 --routes /routes.json > /gateway.log 2>&1 &
ask calm
shape delay 10ms 8ms 25% loss 5% reorder 25% 50%
ask disturbed
/usr/sbin/tc -s qdisc show dev lo | grep -o 'dropped [0-9]*'
shape rate 100mbit
during slow shape rate 1mbit
shape delay 1ms
during crawled crawls
during jumped jumps
sed 's/^/LOG /' /decode-0.log /stage-0.log /stage-1.log

# A head that starts again numbers its groups by a clock that is days behind what one member knows and another one, new, does not.
kill -9 $head $stage
jump -172800
member decode decode-0
member stage stage-1
ask again
"#;

#[test]
fn a_ring_answers_alike_over_bad_links_and_through_jumps_of_the_clock() {
    if let Some(why) = Vm::unavailable() {
        skipped(&why);
        return;
    }
    let ranks = Ranks::of_demo();
    let endpoints = [9000, 9001, 9002].map(|port| format!("127.0.0.1:{port}"));
    let mut plan = ranks.ring_plan(&endpoints);
    plan["model"]["path"] = json!("/model");
    let mut gateway = ranks.plan_of("gateway", "gateway-0", "127.0.0.1:8000");
    gateway["model"]["path"] = json!("/model");
    let routes = json!({"workers": [
        {"name": "decode-0", "role": "Decode", "endpoint": endpoints[0]},
    ]});
    let body = json!({
        "model": "hearth-demo", "prompt": "What is Hearth? ".repeat(8), "max_tokens": 64,
        "temperature": 1, "seed": 7, "ignore_eos": true,
    });
    let output = Vm::default()
        .memory_mib(2048)
        .worker()
        .module("sch_netem")
        .file("/usr/sbin/tc", "/usr/sbin/tc")
        .file(root().join("models/hearth-demo"), "/model")
        .json(&plan, "/ring.json")
        .json(&gateway, "/gateway.json")
        .json(&routes, "/routes.json")
        .json(&body, "/body.json")
        .run(SCRIPT);
    let answer = |name: &str| {
        let start = format!("ANSWER {name} ");
        let line = output.lines().find_map(|line| line.strip_prefix(&start));
        line.unwrap_or_else(|| panic!("no {start}in\n{output}"))
    };
    let calm = answer("calm");
    assert!(calm.len() > 40, "{output}");
    for name in ["disturbed", "slow", "crawled", "jumped", "again"] {
        assert_eq!(answer(name), calm, "{output}");
    }
    assert!(
        !output.contains("dropped 0\n"),
        "no packet was lost\n{output}"
    );
    let when = |what: &str, name: &str| -> f64 {
        let start = format!("{what} {name} ");
        let line = output.lines().find_map(|line| line.strip_prefix(&start));
        let time = line.and_then(|time| time.trim().parse().ok());
        time.unwrap_or_else(|| panic!("no {start}in\n{output}"))
    };
    for name in ["slow", "crawled", "jumped"] {
        let moments = ["BEGINS", "DISTURBS", "ENDS"].map(|what| when(what, name));
        assert!(moments.is_sorted(), "{name}: {moments:?}\n{output}");
    }
    for words in [": slow: the way from ", ": no longer slow: the way from "] {
        assert!(output.contains(words), "{words}\n{output}");
    }
    let lost = output.lines().find(|line| line.contains("is lost"));
    assert_eq!(lost, None, "{output}");
}
