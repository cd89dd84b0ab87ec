//! The invariants of docs/architecture.md that a compiler does not hold, as data and a reader of source text.
//!
//! Every rule names what it guards; a breach is printed as `file:line: sentence` and fails the run.

use anyhow::{Context, Result, bail};
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// Inside the daemon arrows point down. A module may import what stands to its right, and itself.
const DAEMON_IMPORTS: &[(&str, &[&str])] = &[
    (
        "app",
        &[
            "http",
            "admin",
            "generate",
            "admission",
            "text",
            "supervisor",
            "model_store",
            "audit",
            "keys",
            "telemetry",
            "system",
            "config",
            "cli",
        ],
    ),
    ("cli", &["config", "offline"]),
    (
        "http",
        &[
            "generate",
            "admission",
            "text",
            "supervisor",
            "model_store",
            "keys",
            "audit",
            "telemetry",
            "system",
            "config",
        ],
    ),
    ("admin", &["admission", "keys", "supervisor", "model_store", "text", "audit", "telemetry", "system", "config"]),
    ("generate", &["admission", "text", "supervisor", "keys", "telemetry", "config"]),
    ("admission", &["audit", "telemetry", "config"]),
    ("keys", &["audit", "telemetry", "config"]),
    ("text", &["telemetry", "config"]),
    ("supervisor", &["text", "model_store", "audit", "telemetry", "system", "config"]),
    ("model_store", &["telemetry", "system", "config"]),
    ("audit", &["telemetry", "system", "config"]),
    ("telemetry", &["system", "config"]),
    ("system", &["config"]),
    ("config", &[]),
    ("worker", &[]),
    // `ernied model`: reads folders with whatever room knows them; nothing imports it but main.
    ("offline", &["worker", "text", "model_store", "config"]),
];

/// What a crate's manifest must not name, and why.
const CRATE_BANS: &[(&str, &[&str], &str)] = &[
    (
        "ctl",
        &["ernied", "ernie-engine", "ernie-kernels", "candle-core", "sqlx", "axum", "tokenizers"],
        "ctl knows the daemon by its socket alone",
    ),
    (
        "engine",
        &["tokio", "axum", "hyper", "ernie-proto", "tokenizers", "sqlx"],
        "the engine knows no process, socket or text",
    ),
    ("kernels", &["tokio", "candle-core", "serde", "ernie-proto", "ernie-engine"], "kernels are compute on slices"),
    ("proto", &["tokio", "axum", "hyper", "ernie-engine"], "proto is plain data"),
];

/// The only places where `unsafe` may stand.
const UNSAFE_ROOMS: &[&str] = &["kernels/", "engine/src/model/weights", "daemon/src/system/"];

/// Names that give away the machine a file was written on.
const PRIVATE_PATHS: &[&str] = &["/work/", "/root/", "/home/"];

const FILE_BYTES_MAX: u64 = 10 << 20;

pub(crate) fn run(root: &Path) -> Result<()> {
    let mut breaches = Vec::new();
    for file in tracked_files(root)? {
        let path = root.join(&file);
        let Ok(meta) = fs::metadata(&path) else { continue };
        if meta.len() > FILE_BYTES_MAX {
            breaches.push(format!("{file}: {} bytes, the limit is {FILE_BYTES_MAX}", meta.len()));
        }
        let Ok(text) = fs::read_to_string(&path) else { continue };
        private_paths(&file, &text, &mut breaches);
        if file.ends_with(".rs") {
            unsafe_rooms(&file, &text, &mut breaches);
            daemon_imports(&file, &text, &mut breaches);
            engine_only_in_worker(&file, &text, &mut breaches);
            header(&file, &text, &mut breaches);
        }
    }
    for (name, banned, why) in CRATE_BANS {
        let manifest = fs::read_to_string(root.join(name).join("Cargo.toml"))?;
        let dependencies = manifest.split("[dev-dependencies]").next().unwrap_or_default();
        for line in dependencies.lines() {
            let key = line.split(['.', ' ', '=']).next().unwrap_or_default();
            if banned.contains(&key) {
                breaches.push(format!("{name}/Cargo.toml: depends on {key}; {why}"));
            }
        }
    }
    if breaches.is_empty() {
        println!("tidy: every rule holds");
        return Ok(());
    }
    for breach in &breaches {
        eprintln!("{breach}");
    }
    bail!("tidy: {} breaches", breaches.len())
}

fn tracked_files(root: &Path) -> Result<BTreeSet<String>> {
    // `git ls-files`, and the plain tree where there is no git (a source archive).
    #[allow(clippy::disallowed_methods, reason = "xtask is no part of the daemon")]
    let listed = std::process::Command::new("git").arg("ls-files").current_dir(root).output();
    if let Ok(output) = listed
        && output.status.success()
    {
        let text = String::from_utf8(output.stdout).context("git ls-files printed no UTF-8")?;
        return Ok(text.lines().map(str::to_owned).collect());
    }
    let mut found = BTreeSet::new();
    walk(root, root, &mut found)?;
    Ok(found)
}

fn walk(root: &Path, folder: &Path, found: &mut BTreeSet<String>) -> Result<()> {
    for entry in fs::read_dir(folder)? {
        let path: PathBuf = entry?.path();
        let name = path.file_name().and_then(|n| n.to_str()).unwrap_or_default().to_owned();
        // `.git` is a file in a worktree.
        if name == "target" || name == ".git" {
            continue;
        }
        if path.is_dir() {
            walk(root, &path, found)?;
        } else if let Ok(relative) = path.strip_prefix(root) {
            found.insert(relative.to_string_lossy().into_owned());
        }
    }
    Ok(())
}

fn private_paths(file: &str, text: &str, breaches: &mut Vec<String>) {
    if file == "xtask/src/tidy.rs" || file == "Cargo.lock" {
        return;
    }
    for (number, line) in text.lines().enumerate() {
        for path in PRIVATE_PATHS {
            if let Some(at) = line.find(path)
                && !line[..at]
                    .ends_with(|c: char| c.is_ascii_alphanumeric() || c == '.' || c == '_' || c == '-' || c == '}')
            {
                breaches.push(format!("{file}:{}: names a path of one machine ({path}…)", number + 1));
            }
        }
    }
}

fn unsafe_rooms(file: &str, text: &str, breaches: &mut Vec<String>) {
    // An allocator that counts, in a test of its own, can not be written without it.
    if UNSAFE_ROOMS.iter().any(|room| file.starts_with(room)) || file.starts_with("xtask/") || file.contains("/tests/")
    {
        return;
    }
    for (number, line) in code_lines(text) {
        if line.contains("unsafe {") || line.contains("unsafe fn") || line.contains("unsafe impl") {
            breaches.push(format!("{file}:{number}: unsafe outside {}", UNSAFE_ROOMS.join(", ")));
        }
    }
}

fn daemon_imports(file: &str, text: &str, breaches: &mut Vec<String>) {
    let Some(inner) = file.strip_prefix("daemon/src/") else { return };
    let room = inner.split(['/', '.']).next().unwrap_or_default();
    if room == "main" || room == "lib" {
        return;
    }
    let Some((_, allowed)) = DAEMON_IMPORTS.iter().find(|(name, _)| *name == room) else {
        breaches.push(format!("{file}: module {room} has no row in xtask/src/tidy.rs DAEMON_IMPORTS"));
        return;
    };
    for (number, line) in code_lines(text) {
        if line.contains("#[cfg(test)]") {
            break; // tests may look anywhere
        }
        for part in line.split("crate::").skip(1) {
            let target: String = part.chars().take_while(|c| c.is_ascii_alphanumeric() || *c == '_').collect();
            let known = DAEMON_IMPORTS.iter().any(|(name, _)| *name == target);
            if known && target != room && !allowed.contains(&target.as_str()) {
                breaches.push(format!("{file}:{number}: {room} may not import {target}: arrows point down"));
            }
        }
    }
}

fn engine_only_in_worker(file: &str, text: &str, breaches: &mut Vec<String>) {
    if !file.starts_with("daemon/src/") || file.starts_with("daemon/src/worker") || file == "daemon/src/main.rs" {
        return;
    }
    for (number, line) in code_lines(text) {
        if line.contains("ernie_engine::") {
            breaches.push(format!("{file}:{number}: only daemon/src/worker names the engine"));
        }
    }
}

fn header(file: &str, text: &str, breaches: &mut Vec<String>) {
    if file.contains("/src/") && !text.trim_start().starts_with("//!") {
        breaches.push(format!("{file}: has no //! header that says what the room is for"));
    }
}

/// Lines with their numbers, without comments.
fn code_lines(text: &str) -> impl Iterator<Item = (usize, &str)> {
    text.lines().enumerate().map(|(i, line)| (i + 1, line)).filter(|(_, line)| !line.trim_start().starts_with("//"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_arrow_that_points_up_is_a_breach() {
        let mut breaches = Vec::new();
        daemon_imports(
            "daemon/src/supervisor/mod.rs",
            "use crate::http::Api;\nuse crate::text::TextModel;\n",
            &mut breaches,
        );
        assert_eq!(breaches.len(), 1, "{breaches:?}");
        assert!(breaches[0].contains("supervisor may not import http"));
    }

    #[test]
    fn http_and_admin_never_meet() {
        let mut breaches = Vec::new();
        daemon_imports("daemon/src/admin/mod.rs", "use crate::http::error;\n", &mut breaches);
        daemon_imports("daemon/src/http/mod.rs", "use crate::admin::peer;\n", &mut breaches);
        assert_eq!(breaches.len(), 2);
    }

    #[test]
    fn a_build_machine_path_is_a_breach() {
        let mut breaches = Vec::new();
        private_paths("docs/x.md", "see /home/me/models\nand tests/work/golden\n", &mut breaches);
        assert_eq!(breaches.len(), 1, "{breaches:?}");
    }

    #[test]
    fn the_tree_is_tidy() {
        run(&crate::project_root()).expect("tidy");
    }
}
