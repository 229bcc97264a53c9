//! The command with which to talk to a deployment that has just come up, to be pasted into another terminal.

use std::path::{Path, PathBuf};

/// Facts that the command depends on.
pub(super) struct Hint<'h> {
    /// This program.
    pub(super) program: Option<PathBuf>,
    /// Program that `hearth` resolves to in a shell, according to the search path.
    pub(super) found: Option<PathBuf>,
    /// Name of the deployment, if others run too.
    pub(super) name: Option<&'h str>,
    /// Directory of its state, if not the user's state directory.
    pub(super) state_dir: Option<&'h Path>,
    /// Whether it requires an API key.
    pub(super) has_keys: bool,
}

impl Hint<'_> {
    /// Returns the `hearth chat` command, with any arguments it needs.
    pub(super) fn line(&self) -> String {
        let mut line = match &self.program {
            Some(program) if self.found.as_ref() != Some(program) => quoted(program),
            _ => "hearth".to_owned(),
        };
        line += " chat";
        if let Some(name) = self.name {
            line += " ";
            line += name;
        }
        if let Some(directory) = self.state_dir {
            line += " --state-dir ";
            line += &quoted(directory);
        }
        if self.has_keys {
            line += " --api-key KEY";
        }
        line
    }
}

/// Quotes a path for a shell.
fn quoted(path: &Path) -> String {
    let text = path.display().to_string();
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "/._-+".contains(c);
    match text.chars().all(is_plain) {
        true => text,
        false => format!("'{}'", text.replace('\'', r"'\''")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_says_what_a_shell_needs_and_no_more() {
        let installed = PathBuf::from("/usr/bin/hearth");
        let mut hint = Hint {
            program: Some(installed.clone()),
            found: Some(installed.clone()),
            name: None,
            state_dir: None,
            has_keys: false,
        };
        assert_eq!(hint.line(), "hearth chat");
        hint.program = Some(PathBuf::from("/home/me/my work/hearth"));
        assert_eq!(hint.line(), "'/home/me/my work/hearth' chat");
        hint.program = Some(PathBuf::from("/src/target/release/hearth"));
        hint.found = None;
        hint.name = Some("demo");
        hint.state_dir = Some(Path::new("/tmp/state"));
        hint.has_keys = true;
        assert_eq!(
            hint.line(),
            "/src/target/release/hearth chat demo --state-dir /tmp/state --api-key KEY"
        );
    }
}
