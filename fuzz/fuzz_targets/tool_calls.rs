//! Any text as an answer with tool calls, in every form and cut anywhere: nothing depends on the cuts, and text without
//! a call comes out as it went in.

#![no_main]

use hearth_server::StopMatcher;
use hearth_server::tools::{Piece, ToolFormat};
use libfuzzer_sys::fuzz_target;

const FORMATS: [ToolFormat; 5] = [
    ToolFormat::DeepseekV3,
    ToolFormat::DeepseekV31,
    ToolFormat::KimiK2,
    ToolFormat::Hermes,
    ToolFormat::Llama3,
];

fuzz_target!(|input: (u8, Vec<u8>, String)| {
    let (format, cuts, text) = input;
    let format = FORMATS[usize::from(format) % FORMATS.len()];
    let whole = parse(format, &[&text]);
    assert_eq!(parse(format, &pieces(&text, &cuts)), whole, "{format:?}");
    if whole.1.is_empty() && !text.contains('<') {
        assert_eq!(whole.0, text, "{format:?}");
    }
    stop(&text, &cuts);
});

/// A stop string from the text itself must be found, wherever the cuts are.
fn stop(text: &str, cuts: &[u8]) {
    let stop: String = text.chars().rev().take(3).collect::<Vec<_>>().into_iter().rev().collect();
    let run = |pieces: &[&str]| {
        let mut matcher = StopMatcher::new(vec![stop.clone()]);
        let mut out = String::new();
        for piece in pieces {
            let released = matcher.push(piece);
            out.push_str(&released.text);
            if released.stopped {
                return (out, true);
            }
        }
        out.push_str(&matcher.finish());
        (out, false)
    };
    let (out, stopped) = run(&pieces(text, cuts));
    assert_eq!((out.clone(), stopped), run(&[text]));
    assert_eq!(stopped, !stop.is_empty());
    assert!(text.starts_with(&out) && (stop.is_empty() || !out.contains(&stop)));
}

fn pieces<'a>(text: &'a str, cuts: &[u8]) -> Vec<&'a str> {
    let mut rest = text;
    let mut pieces = Vec::new();
    for cut in cuts {
        let mut at = usize::from(*cut % 16).min(rest.len());
        while !rest.is_char_boundary(at) {
            at += 1;
        }
        let (piece, tail) = rest.split_at(at);
        pieces.push(piece);
        rest = tail;
    }
    pieces.push(rest);
    pieces
}

type Call = (Option<String>, String, String, bool);

fn parse(format: ToolFormat, pieces: &[&str]) -> (String, Vec<Call>) {
    let mut parser = format.parser(vec!["f".into(), "get_weather".into()]);
    let mut out = Vec::new();
    for piece in pieces {
        parser.push(piece, &mut out);
    }
    parser.finish(&mut out);
    let (mut content, mut calls) = (String::new(), Vec::<Call>::new());
    for piece in out {
        match piece {
            Piece::Content(text) => content.push_str(&text),
            Piece::Call { index, id, name } => {
                assert_eq!(index as usize, calls.len());
                calls.push((id, name, String::new(), false));
            }
            Piece::Arguments { index, text } => {
                assert_eq!(index as usize + 1, calls.len());
                calls[index as usize].2.push_str(&text);
            }
            Piece::CallEnd { index } => calls[index as usize].3 = true,
        }
    }
    (content, calls)
}
