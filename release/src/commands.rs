//! The program's commands.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use clap::{Args, Parser, Subcommand};
use hearth_release::bundle::Bundle;
use hearth_release::chart;
use hearth_release::image::{Image, Program};
use hearth_release::layout::Layout;
use hearth_release::sbom::{Packages, Subject};

/// The version that all of it is of.
const VERSION: &str = env!("CARGO_PKG_VERSION");
const MIB: f64 = (1 << 20) as f64;
/// Most bytes that the operator's image may take on a node: it should fit anywhere.
const OPERATOR_LIMIT_BYTES: u64 = 25 << 20;

/// Makes what a release consists of, from programs that are built.
#[derive(Parser)]
#[command(name = "hearth-release", version)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    command: Release,
}

#[derive(Subcommand)]
enum Release {
    /// Write the images of both programs, each as an archive in OCI layout, for all platforms that programs are named of
    Images(ImagesArgs),
    /// Pack the chart
    Chart(ChartArgs),
    /// Write a CycloneDX file for each program: what it is built from
    Sbom(SbomArgs),
    /// Write a release, with models, as one archive for nodes without internet
    Bundle(BundleArgs),
}

/// When all of it was made, so far as it says so.
#[derive(Args)]
struct Created {
    /// Seconds since 1970 that are named as the time of making
    #[arg(long = "created", env = "SOURCE_DATE_EPOCH", default_value_t = 0)]
    created_s: i64,
}

#[derive(Args)]
struct ImagesArgs {
    /// The hearth program; once for each platform
    #[arg(long, required = true)]
    operator: Vec<PathBuf>,
    /// The hearth-worker program; once for each platform
    #[arg(long, required = true)]
    worker: Vec<PathBuf>,
    /// Directory that hearth-worker cuda-compile filled
    #[arg(long)]
    kernels: PathBuf,
    /// Directory of the demo model
    #[arg(long, default_value = "models/hearth-demo")]
    demo: PathBuf,
    /// Registry that the images are named by
    #[arg(long)]
    registry: String,
    /// Directory for hearth.tar and hearth-worker.tar
    #[arg(long)]
    output: PathBuf,
    #[command(flatten)]
    created: Created,
}

#[derive(Args)]
struct ChartArgs {
    /// Directory of the chart
    #[arg(long, default_value = "charts/hearth")]
    chart: PathBuf,
    /// The chart's default registry (default: the one that its values name)
    #[arg(long)]
    registry: Option<String>,
    /// Directory for hearth-VERSION.tgz
    #[arg(long)]
    output: PathBuf,
}

#[derive(Args)]
struct SbomArgs {
    /// Hearth's source tree
    #[arg(long, default_value = ".")]
    source: PathBuf,
    /// Directory for hearth.cdx.json and hearth-worker.cdx.json
    #[arg(long)]
    output: PathBuf,
    #[command(flatten)]
    created: Created,
}

#[derive(Args)]
struct BundleArgs {
    /// Directory of the release, as scripts/release.sh writes it
    #[arg(long)]
    release: PathBuf,
    /// Store of models, as hearth models pull fills it ($HEARTH_CACHE or ~/.cache/hearth); without it the bundle has no models
    #[arg(long)]
    store: Option<PathBuf>,
    /// Name or key of a model of the store, as hearth models list shows them; may be repeated (default: all)
    #[arg(long, requires = "store")]
    model: Vec<String>,
    /// The archive
    #[arg(long)]
    output: PathBuf,
}

/// Runs the chosen command.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    match &arguments.command {
        Release::Images(args) => images(args),
        Release::Chart(args) => chart(args),
        Release::Sbom(args) => sbom(args),
        Release::Bundle(args) => bundle(args),
    }
}

fn images(args: &ImagesArgs) -> anyhow::Result<()> {
    make_directory(&args.output)?;
    for (program, built) in [
        (Program::Operator, &args.operator),
        (Program::Worker, &args.worker),
    ] {
        let name = program.name();
        let reference = format!("{}/{name}:{VERSION}", args.registry);
        let archive = args.output.join(format!("{name}.tar"));
        let mut layout = Layout::new(&reference)
            .compressed()
            .created(args.created.created_s);
        let mut platforms = Vec::new();
        for built in built {
            let mut image = Image::of(program, built, &args.demo)?;
            if program == Program::Worker {
                image = image.directory(&args.kernels, "/usr/share/hearth/kernels")?;
            }
            let unpacked_bytes = image.unpacked_bytes();
            if program == Program::Operator && unpacked_bytes > OPERATOR_LIMIT_BYTES {
                bail!(
                    "{name} takes {:.1} MiB on a node, more than {:.0} MiB\n  find what grew: a dependency or a feature",
                    unpacked_bytes as f64 / MIB,
                    OPERATOR_LIMIT_BYTES as f64 / MIB
                );
            }
            let platform = image.platform().map_or("", |it| it.architecture());
            let unpacked_mib = unpacked_bytes as f64 / MIB;
            platforms.push(format!("{platform} {unpacked_mib:.1} MiB on a node"));
            layout = layout.image(image);
        }
        let bytes = layout.write(&archive)?;
        println!(
            "{}  {reference}  {:.1} MiB, {}",
            archive.display(),
            bytes as f64 / MIB,
            platforms.join(", ")
        );
    }
    Ok(())
}

fn chart(args: &ChartArgs) -> anyhow::Result<()> {
    make_directory(&args.output)?;
    let registry = match &args.registry {
        Some(registry) => registry.clone(),
        None => chart::registry(&args.chart)?,
    };
    let path = chart::pack(&args.chart, VERSION, &registry, &args.output)?;
    println!("{}", path.display());
    Ok(())
}

fn sbom(args: &SbomArgs) -> anyhow::Result<()> {
    make_directory(&args.output)?;
    let packages = Packages::read(&args.source)?;
    for (program, package) in [
        (Program::Operator, "hearth-operator"),
        (Program::Worker, "hearth-worker"),
    ] {
        let subject = Subject {
            program: program.name(),
            package,
            version: VERSION,
        };
        let bill = packages.bill(&subject, args.created.created_s)?;
        let path = args.output.join(format!("{}.cdx.json", program.name()));
        let mut text = serde_json::to_vec_pretty(&bill)?;
        text.push(b'\n');
        std::fs::write(&path, text).with_context(|| path.display().to_string())?;
        println!("{}", path.display());
    }
    Ok(())
}

fn bundle(args: &BundleArgs) -> anyhow::Result<()> {
    let bundle = Bundle {
        release: &args.release,
        store: args.store.as_deref(),
        models: &args.model,
        version: VERSION,
    };
    let models = bundle.write(&args.output)?;
    for model in &models {
        let source = model.about.as_ref().map_or("", |about| &about.source);
        println!("{source}  {:.1} MiB", model.bytes as f64 / MIB);
    }
    let bytes = std::fs::metadata(&args.output)?.len();
    println!("{}  {:.1} MiB", args.output.display(), bytes as f64 / MIB);
    Ok(())
}

fn make_directory(path: &Path) -> anyhow::Result<()> {
    std::fs::create_dir_all(path).with_context(|| path.display().to_string())
}
