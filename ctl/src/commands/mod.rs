//! The verbs; one file each, named as the daemon's side.

mod audit;
mod bench;
mod bench_swap;
mod chat;
mod config;
mod debug;
mod doctor;
mod events;
mod keys;
mod kv;
mod logs;
mod model;
mod models;
mod status;
mod top;
mod workers;

use crate::cli::{ApiArgs, Cli, Verb};
use crate::client::{Admin, Api};
use crate::output;
use anyhow::{Context, Result};
use clap::CommandFactory;
use ernie_proto::admin::Status;
use std::process::ExitCode;

/// Runs the verb.
pub(crate) async fn run(cli: Cli) -> Result<ExitCode> {
    let admin = Admin::new(cli.socket);
    let json = cli.json;
    match cli.verb {
        Verb::Status { check, watch } => return status::run(&admin, json, check, watch).await,
        Verb::Top { interval } => top::run(&admin, interval).await?,
        Verb::Workers { act } => workers::run(&admin, json, act).await?,
        Verb::Drain { timeout, exit } => workers::drain(&admin, json, timeout, exit).await?,
        Verb::Resume => workers::resume(&admin, json).await?,
        Verb::Reload => return config::reload(&admin, json).await,
        Verb::Config { act } => return config::run(&admin, json, act).await,
        Verb::Logs { act } => logs::run(&admin, json, act).await?,
        Verb::Key { act } => keys::run(&admin, json, act).await?,
        Verb::Usage { days } => keys::usage(&admin, json, days).await?,
        Verb::Audit { act } => return audit::run(&admin, json, act).await,
        Verb::Swap(args) => return models::swap(&admin, json, args).await,
        Verb::Rollback { reason, no_wait } => return models::rollback(&admin, json, reason, no_wait).await,
        Verb::Model { act } => return model::run(&admin, json, act).await,
        Verb::Kv { act, top } => kv::run(&admin, json, act, top).await?,
        Verb::Set { assignment } => return config::set(&admin, json, &assignment).await,
        Verb::ResetPrefixCache => kv::drop_prefixes(&admin, json).await?,
        Verb::Metrics => output::print(&admin.text("/v1/metrics").await?)?,
        Verb::Debug { act } => debug::run(&admin, json, act).await?,
        Verb::Events { lines } => events::run(&admin, json, lines).await?,
        Verb::Chat(args) => chat::run(&admin, args).await?,
        Verb::Doctor(args) => return doctor::run(&admin, json, args).await,
        Verb::Bench(args) => return bench::run(&admin, json, args).await,
        Verb::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "ernie-ctl", &mut script);
            output::print(&String::from_utf8_lossy(&script))?;
        }
        Verb::Man { dir } => man(&dir)?,
    }
    Ok(ExitCode::SUCCESS)
}

/// The API that `chat` and `bench` use: the one named, or the one that the daemon behind the socket listens on.
async fn api(admin: &Admin, args: &ApiArgs) -> Result<(Api, String)> {
    let url = match &args.url {
        Some(url) => url.clone(),
        None => {
            let status: Status = admin.get("/v1/status").await.context("give the API with --url, or")?;
            status.listening.into_iter().next().context("the daemon listens nowhere")?
        }
    };
    let api = Api::new(&url, args.api_key.clone())?;
    let model = match &args.model {
        Some(model) => model.clone(),
        None => api.first_model().await?,
    };
    Ok((api, model))
}

fn man(dir: &std::path::Path) -> Result<()> {
    std::fs::create_dir_all(dir).with_context(|| dir.display().to_string())?;
    clap_mangen::generate_to(Cli::command(), dir)?;
    Ok(())
}
