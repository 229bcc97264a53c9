use super::*;
use crate::ring_problem::{Device, Gpu, Head, Link};

const MB: u64 = 1_000_000;

/// Two devices with four layers of 10 MB, which take 2 ms each; a byte takes 1 ms a MB from disk, a hop 1 ms.
fn problem(memory_bytes: u64) -> Problem {
    let layer = Layer {
        stored_bytes: 10 * MB,
        read_bytes: 10 * MB,
        routed_bytes: 0,
        kv_bytes: 0,
    };
    let times = LayerTimes {
        token_ms: vec![2.0; 4],
        prompt_token_ms: vec![1.0; 4],
    };
    let device = Device {
        name: "device".to_owned(),
        memory_bytes,
        buffer_bytes: 0,
        disk_read_gbps: 1.0,
        map_ms_per_gb: 0.0,
        must_fit: false,
        cpus: times,
        gpu: None,
    };
    let link = Link {
        latency_ms: 1.0,
        gbps: 1e9,
    };
    Problem {
        devices: vec![device; 2],
        layers: vec![layer; 4],
        head: Head {
            stored_bytes: 0,
            embedding_bytes: 0,
            token_ms: 3.0,
        },
        links: vec![vec![link; 2]; 2],
        window_bytes: 0,
        hidden_bytes: 1,
        prompt: Prompt {
            tokens: 8,
            chunk_tokens: 8,
            flight_tokens: 4,
        },
    }
}

/// `layers` in windows of `width`, the devices in turn.
fn windows_of(layers: usize, width: usize) -> Vec<Window> {
    let windows = (0..layers / width).map(|index| Window {
        device: index % 2,
        round: index / 2,
        layers: index * width..(index + 1) * width,
        gpu_layers: 0,
    });
    windows.collect()
}

fn windows(width: usize) -> Vec<Window> {
    windows_of(4, width)
}

fn tpot_ms_of(problem: &Problem, windows: &[Window]) -> f64 {
    let ms = Simulator::new(problem).tpot_ms(windows).unwrap();
    (ms * 1e3).round() / 1e3
}

fn tpot_ms(problem: &Problem, width: usize) -> f64 {
    tpot_ms_of(problem, &windows(width))
}

#[test]
fn layers_that_fit_are_read_once() {
    let problem = problem(20 * MB);
    // Layers, hops there and back, the head; two rounds have two hops more.
    assert_eq!(tpot_ms(&problem, 2), 8.0 + 2.0 + 3.0);
    assert_eq!(tpot_ms(&problem, 1), 8.0 + 4.0 + 3.0);
}

/// Twelve layers of 10 MB for each device, and memory for eight of them.
fn short_of_memory() -> Problem {
    let mut problem = problem(80 * MB);
    problem.layers = vec![problem.layers[0]; 24];
    for device in &mut problem.devices {
        device.cpus = LayerTimes {
            token_ms: vec![2.0; 24],
            prompt_token_ms: vec![1.0; 24],
        };
    }
    problem
}

#[test]
fn a_window_waits_for_what_could_not_be_read_ahead() {
    let problem = short_of_memory();
    let windows = windows_of(24, 12);
    let share = Simulator::new(&problem).shares(&windows)[0];
    // A device has one window, so that reading further ahead than the least would only mean to read more.
    assert_eq!(
        (share.overflow_bytes, share.read_ahead_bytes),
        (40 * MB, 20 * MB)
    );
    // Half of each layer passes through memory, 20 MB of them read while the other device is at work. Five layers take
    // 2 ms each; by then 3 MB more are there than they took, and the other seven come at the disk's pace, 5 ms each.
    // The sixth needs only 2 MB more. Both devices wait so long, one after the other.
    assert_eq!(
        tpot_ms_of(&problem, &windows),
        2.0 * (10.0 + 4.0 + 6.0 * 5.0) + 2.0 + 3.0
    );
}

#[test]
fn in_rounds_all_is_read_while_others_compute() {
    // The same 60 MB of each device; the disk is never idle.
    assert_eq!(tpot_ms_of(&short_of_memory(), &windows_of(24, 4)), 60.0);
}

#[test]
fn flights_wait_for_the_one_before_on_a_slow_link() {
    let mut problem = problem(20 * MB);
    problem.prompt.flight_tokens = 2;
    let ttft_ms = |problem: &Problem| Simulator::new(problem).ttft_ms(&windows(2)).round();
    // The last of four flights leaves the first device at 16, is there at 17, and 4 later on its way back.
    assert_eq!(ttft_ms(&problem), 16.0 + 1.0 + 4.0 + 1.0 + 3.0);
    // Each takes 10 ms on the link, one after the other.
    problem.links[0][1].gbps = 2e-7;
    assert_eq!(ttft_ms(&problem), 4.0 + 40.0 + 1.0 + 4.0 + 1.0 + 3.0);
}

#[test]
fn mapping_what_was_read_takes_time_of_the_device() {
    let mut problem = short_of_memory();
    for device in &mut problem.devices {
        device.map_ms_per_gb = 100.0;
        device.disk_read_gbps = 1e3;
    }
    // Layers, hops, the head; 60 MB of each device are mapped.
    assert_eq!(tpot_ms_of(&problem, &windows_of(24, 4)), 57.0 + 2.0 * 6.0);
}

/// A token chooses 5 of the 9 MB of experts of each layer.
fn with_experts(memory_bytes: u64) -> Problem {
    let mut problem = problem(memory_bytes);
    for layer in &mut problem.layers {
        layer.read_bytes = 6 * MB;
        layer.routed_bytes = 5 * MB;
    }
    problem
}

#[test]
fn chosen_experts_are_never_read_ahead() {
    let problem = with_experts(16 * MB);
    // 4 MB of a device's 18 MB of experts are missing: each layer waits for so much of 5 MB.
    let wait_ms: f64 = 4.0 * 5.0 * 4.0 / 18.0;
    assert_eq!(tpot_ms(&problem, 1), 15.0 + (wait_ms * 1e3).round() / 1e3);
}

#[test]
fn experts_without_room_are_read_for_each_token_and_mapped() {
    let of = |map_ms_per_gb: f64| {
        let mut problem = with_experts(16 * MB);
        problem.devices[1].memory_bytes = 20 * MB;
        problem.devices[0].map_ms_per_gb = map_ms_per_gb;
        problem
    };
    let waits_ms = |map_ms_per_gb| {
        let ms = tpot_ms(&of(map_ms_per_gb), 1) - 15.0;
        (ms * 18.0).round()
    };
    // Of 18 MB of experts, 4 MB have no room, of which two layers choose 5 ninths.
    assert_eq!(waits_ms(0.0), 2.0 * 5.0 * 4.0);
    assert_eq!(waits_ms(1e3), 2.0 * (2.0 * 5.0 * 4.0));
    let ttft_ms = |problem: &Problem| Simulator::new(problem).ttft_ms(&windows(1));
    let mut with_room = of(0.0);
    with_room.devices[0].memory_bytes = 20 * MB;
    let reads_ms = ttft_ms(&of(0.0)) - ttft_ms(&with_room);
    assert!(reads_ms > 1e-3, "{reads_ms}");
}

#[test]
fn beyond_all_experts_what_each_token_needs_is_read_too() {
    let tpot_ms = |memory_bytes| tpot_ms(&with_experts(memory_bytes), 1);
    // 14 MB of a device's 18 MB of experts are missing, and beside the 5 MB of the layer at work there is room for 1 of the
    // 2 MB that each token needs.
    let experts_ms: f64 = 4.0 * 5.0 * 14.0 / 18.0;
    assert_eq!(
        tpot_ms(6 * MB),
        15.0 + 2.0 + (experts_ms * 1e3).round() / 1e3
    );
    // Nothing stays.
    assert_eq!(tpot_ms(MB), 15.0 + 4.0 * 6.0);
}

#[test]
fn a_window_reads_what_each_token_needs_once_for_each_of_its_layers() {
    // As above, nothing stays: each layer waits for its 6 MB, whether or not the device computed the one before.
    assert_eq!(tpot_ms(&with_experts(MB), 2), 8.0 + 2.0 + 3.0 + 4.0 * 6.0);
}

#[test]
fn a_device_without_experts_reads_ahead_though_others_have_some() {
    let mut problem = problem(15 * MB);
    for layer in &mut problem.layers[2..] {
        layer.read_bytes = 6 * MB;
        layer.routed_bytes = 5 * MB;
    }
    problem.devices[1].memory_bytes = 20 * MB;
    let share = Simulator::new(&problem).shares(&windows(2))[0];
    assert_eq!((share.overflow_bytes, share.expert_bytes), (5 * MB, 0));
    assert_eq!(share.read_ahead_bytes, 15 * MB);
    // 20 MB pass through, of which 15 are read while the other device is at work, and the rest while a layer is computed.
    let waits_ms = tpot_ms(&problem, 2) - 13.0;
    assert!(waits_ms > 0.0 && waits_ms < 10.0, "{waits_ms}");
}

#[test]
fn what_weights_pass_through_must_have_room_beside_kv() {
    let mut problem = short_of_memory();
    let windows = windows_of(24, 12);
    let fits = |problem: &Problem| Simulator::new(problem).tpot_ms(&windows).is_some();
    problem.window_bytes = 20 * MB;
    assert!(fits(&problem));
    for layer in &mut problem.layers {
        layer.kv_bytes = 5 * MB;
    }
    assert!(fits(&problem), "60 MB of KV, and 20 MB beside it");
    problem.window_bytes += 1;
    assert!(!fits(&problem));
}

#[test]
fn a_gpu_has_its_layers_in_its_own_memory() {
    let mut problem = problem(10 * MB);
    problem.devices[0].gpu = Some(Gpu {
        memory_bytes: 10 * MB,
        buffer_bytes: 0,
        times: LayerTimes {
            token_ms: vec![0.5; 4],
            prompt_token_ms: vec![0.1; 4],
        },
        copy: Link {
            latency_ms: 0.25,
            gbps: 1e9,
        },
    });
    problem.devices[1].memory_bytes = 20 * MB;
    let mut windows = windows(2);
    windows[0].gpu_layers = 1;
    let simulator = Simulator::new(&problem);
    let ms = simulator.tpot_ms(&windows).unwrap();
    // A layer on the GPU with two copies, three on CPUs, hops, the head.
    assert!((ms - (0.5 + 0.5 + 6.0 + 2.0 + 3.0)).abs() < 1e-3, "{ms}");
    windows[0].gpu_layers = 2;
    assert_eq!(simulator.tpot_ms(&windows), None);
}

#[test]
fn flights_of_a_prompt_follow_each_other() {
    let problem = problem(20 * MB);
    let simulator = Simulator::new(&problem);
    // A flight of 4 tokens takes 8 ms on each device; the second follows 8 ms behind the first.
    let ms = simulator.ttft_ms(&windows(2));
    assert!(
        (ms - (8.0 + 1.0 + 8.0 + 8.0 + 1.0 + 3.0)).abs() < 1e-3,
        "{ms}"
    );
}

#[test]
fn a_pass_ends_before_the_next_one_begins() {
    let mut problem = problem(20 * MB);
    problem.prompt.chunk_tokens = 4;
    let ms = Simulator::new(&problem).ttft_ms(&windows(2));
    let pass_ms = 8.0 + 1.0 + 8.0 + 1.0;
    assert!((ms - (2.0 * pass_ms + 3.0)).abs() < 1e-3, "{ms}");
}

#[test]
fn what_is_read_ahead_is_in_the_way_of_a_flight_behind_another() {
    let mut problem = short_of_memory();
    problem.links[0][1].latency_ms = 0.0;
    problem.links[1][0].latency_ms = 0.0;
    let ttft_ms = |flight_tokens: u32, width: usize| {
        let mut problem = problem.clone();
        problem.prompt.flight_tokens = flight_tokens;
        Simulator::new(&problem).ttft_ms(&windows_of(24, width))
    };
    // With one window a device, what is read ahead is what the next flight needs: of its layers 60 MB pass through memory.
    assert!((ttft_ms(8, 12) - (2.0 * 96.0 + 3.0)).abs() < 1e-3);
    assert!((ttft_ms(4, 12) - (60.0 * 3.0 + 3.0)).abs() < 1e-3);
    // With several, it is not.
    assert!(ttft_ms(4, 3) > ttft_ms(8, 3));
}
