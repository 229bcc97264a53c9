//! Behaviour of the programs when standard output is a full disk or a reader that leaves early.

use std::process::Command;

use hearth_tests::{Up, hearth, root, run, worker};

/// Runs a shell line with both programs in `$HEARTH` and `$WORKER`; returns exit code and standard error.
fn shell(line: &str, state: &str) -> (i32, String) {
    let (code, _, errors) = run(Command::new("bash")
        .args(["-o", "pipefail", "-c", line])
        .current_dir(root())
        .env("HEARTH", hearth().get_program())
        .env("WORKER", worker().get_program())
        .env("HEARTH_STATE_DIR", state));
    (code, errors)
}

/// Checks that each command reports lost output on a full disk, and accepts a reader that reads none of it.
fn check(commands: &[&str], state: &str) {
    for command in commands {
        let (code, errors) = shell(&format!("{command} > /dev/full"), state);
        assert_eq!(code, 1, "{command}: {errors}");
        assert!(
            errors.contains("error: standard output cannot be written: No space left"),
            "{command}: {errors}"
        );
        for reader in ["true", "head -n 1 > /dev/null"] {
            let (code, errors) = shell(&format!("{command} | {reader}"), state);
            assert_eq!(code, 0, "{command} | {reader}: {errors}");
            assert!(!errors.contains("error"), "{command} | {reader}: {errors}");
            assert!(
                !errors.contains("panicked"),
                "{command} | {reader}: {errors}"
            );
        }
    }
}

#[test]
fn lost_output_is_told_and_a_reader_that_left_is_not() {
    let state = tempfile::tempdir().expect("directory");
    let state = state.path().display().to_string();
    check(
        &[
            "$HEARTH crd",
            "$HEARTH completion bash",
            "$WORKER facts --model models/hearth-demo",
            "$WORKER facts --json --model models/hearth-demo",
            "$WORKER generate --model models/hearth-demo --prompt Hearth --max-tokens 8",
            "$WORKER generate --json --model models/hearth-demo --prompt Hearth --max-tokens 8",
        ],
        &state,
    );
}

#[test]
fn lost_answers_and_logs_are_told() {
    let up = Up::demo();
    let state = up.state_dir().display().to_string();
    check(
        &[
            "$HEARTH chat -m 'What is Hearth?'",
            "$HEARTH logs demo",
            "$HEARTH status",
        ],
        &state,
    );
}
