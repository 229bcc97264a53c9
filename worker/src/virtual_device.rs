//! Properties of a virtual device, as they are written after `--device virtual:`.

use std::fmt::Display;
use std::path::PathBuf;
use std::str::FromStr;

use hearth_crds::MemoryQuantity;
use hearth_kernels::CpuOptions;
use hearth_virtual::{CopyModel, Modelled, RoutingModel, VirtualMode, VirtualOptions};

/// A virtual device: its memory, and whether it computes.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct VirtualArg {
    /// Bytes of its memory.
    memory_bytes: u64,
    mode: VirtualMode,
    /// File that has it lost.
    fault: Option<PathBuf>,
}

/// Property with which plans have several equal devices, each of which has the others.
pub(crate) const COUNT: &str = "count";

/// All other properties.
const NAMES: [&str; 11] = [
    "memory", "mode", "copy", "read", "compute", "launch", "stretch", "routing", "seed", "copies",
    "fault",
];

/// Those that a device without a model of time has no use for.
const MODELLED: [&str; 7] = [
    "read", "compute", "launch", "stretch", "routing", "seed", "copies",
];

const DEFAULT_LAUNCH_US: f64 = 5.0;
const DEFAULT_STRETCH: f64 = 10.0;
const DEFAULT_SEED: u64 = 1;

/// Units of rates: a thousand of one is the next.
const BYTES_PER_S: &[&str] = &["B/s", "kB/s", "MB/s", "GB/s", "TB/s"];
const FLOPS: &[&str] = &["FLOPS", "kFLOPS", "MFLOPS", "GFLOPS", "TFLOPS", "PFLOPS"];
const NANOSECONDS: &[&str] = &["ns", "us", "ms"];

impl VirtualArg {
    /// Whether it computes nothing.
    pub(crate) fn is_modelled(&self) -> bool {
        matches!(self.mode, VirtualMode::Modelled(_))
    }

    /// Real seconds of a second of its time; `None` if it computes.
    pub(crate) fn stretch(&self) -> Option<f64> {
        self.mode.stretch()
    }

    /// Bytes of its memory.
    pub(crate) fn memory_bytes(&self) -> u64 {
        self.memory_bytes
    }

    /// Why it is lost; `None` while it answers.
    pub(crate) fn lost(&self) -> Option<String> {
        hearth_virtual::cause_of_loss(self.fault.as_deref()?)
    }

    /// Options for opening it, without a trace.
    pub(crate) fn options(&self, cpu: CpuOptions) -> VirtualOptions {
        VirtualOptions {
            mode: self.mode,
            fault: self.fault.clone(),
            ..VirtualOptions::exact(self.memory_bytes, cpu)
        }
    }
}

impl FromStr for VirtualArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let properties = Properties::parse(text)?;
        let memory_bytes = match properties.value("memory") {
            None => {
                return Err("a virtual device needs memory: write virtual:memory=8Gi".to_owned());
            }
            Some(value) => value
                .parse::<MemoryQuantity>()
                .map_err(|error| format!("memory={value}: {error}"))?
                .bytes(),
        };
        if memory_bytes == 0 {
            return Err("its memory is 0 bytes: give it some, as in memory=8Gi".to_owned());
        }
        let mode = match properties.value("mode") {
            None | Some("exact") => properties.exact()?,
            Some("modelled") => VirtualMode::Modelled(properties.modelled()?),
            Some(other) => {
                return Err(format!(
                    "mode={other}: write mode=exact, which computes what a GPU would, or mode=modelled, which models how long it takes"
                ));
            }
        };
        let fault = match properties.value("fault") {
            Some("") => {
                return Err("fault is empty: name a file that, once it exists, has the device lost, as in fault=/tmp/fault".to_owned());
            }
            file => file.map(PathBuf::from),
        };
        Ok(Self {
            memory_bytes,
            mode,
            fault,
        })
    }
}

/// Names with their values, each name once.
struct Properties<'a>(Vec<(&'a str, &'a str)>);

impl<'a> Properties<'a> {
    fn parse(text: &'a str) -> Result<Self, String> {
        let mut all: Vec<(&str, &str)> = Vec::new();
        for property in text.split(',').filter(|_| !text.is_empty()) {
            let (name, value) = property.split_once('=').unwrap_or((property, ""));
            if name == COUNT {
                return Err(
                    "count is for hearth up, hearth plan and agents, which plan over several devices: leave it out, a tool has one".to_owned(),
                );
            }
            if !NAMES.contains(&name) {
                return Err(format!(
                    "a virtual device has no property `{property}`: it has {}, and {COUNT} for plans over several, as in virtual:memory=8Gi",
                    NAMES.join(", ")
                ));
            }
            if all.iter().any(|(earlier, _)| *earlier == name) {
                return Err(format!("{name} is written twice: write it once"));
            }
            all.push((name, value));
        }
        Ok(Self(all))
    }

    fn value(&self, name: &str) -> Option<&'a str> {
        let property = self.0.iter().find(|(of, _)| *of == name);
        property.map(|(_, value)| *value)
    }

    fn exact(&self) -> Result<VirtualMode, String> {
        match self.0.iter().find(|(name, _)| MODELLED.contains(name)) {
            Some((name, _)) => Err(format!(
                "{name} has no effect on a device that computes: leave it out, or write mode=modelled"
            )),
            None => Ok(VirtualMode::Exact {
                copy_bytes_per_s: self.quantity("copy", BYTES_PER_S, "copy=1GB/s")?,
            }),
        }
    }

    fn modelled(&self) -> Result<Modelled, String> {
        Ok(Modelled {
            copy_bytes_per_s: self.needed("copy", BYTES_PER_S, "copy=50GB/s")?,
            read_bytes_per_s: self.needed("read", BYTES_PER_S, "read=3TB/s")?,
            compute_flops: self.needed("compute", FLOPS, "compute=50TFLOPS")?,
            launch_us: match self.value("launch") {
                Some("0") => 0.0,
                _ => self
                    .quantity("launch", NANOSECONDS, "launch=5us")?
                    .map_or(DEFAULT_LAUNCH_US, |launch_ns| launch_ns / 1e3),
            },
            stretch: self
                .quantity("stretch", &[""], "stretch=10")?
                .unwrap_or(DEFAULT_STRETCH),
            routing: self.routing()?,
            seed: self.value("seed").map_or(Ok(DEFAULT_SEED), |value| {
                let wrong = |_| format!("seed={value}: write an integer, as in seed=1");
                value.parse().map_err(wrong)
            })?,
            copies: match self.value("copies") {
                None | Some("none") => CopyModel::None,
                Some("real") => CopyModel::Real,
                Some(other) => {
                    return Err(format!(
                        "copies={other}: write copies=none, or copies=real to have weights copied in the host's memory at the pace of the link"
                    ));
                }
            },
        })
    }

    fn routing(&self) -> Result<RoutingModel, String> {
        let Some(value) = self.value("routing") else {
            return Ok(RoutingModel::Uniform);
        };
        let exponent = value.strip_prefix("zipf:").map(str::parse::<f64>);
        match (value, exponent) {
            ("uniform", _) => Ok(RoutingModel::Uniform),
            (_, Some(Ok(exponent))) if exponent.is_finite() && exponent > 0.0 => {
                Ok(RoutingModel::Zipf { exponent })
            }
            _ => Err(format!(
                "routing={value}: write routing=uniform, or routing=zipf:1.1 with an exponent larger than 0"
            )),
        }
    }

    fn needed(&self, name: &str, units: &[&str], example: &str) -> Result<f64, String> {
        let missing = || format!("mode=modelled needs {name}: write it, as in {example}");
        self.quantity(name, units, example)?.ok_or_else(missing)
    }

    /// A number larger than 0 with one of the units, of which each is a thousand times the one before; in the first one.
    fn quantity(&self, name: &str, units: &[&str], example: &str) -> Result<Option<f64>, String> {
        let Some(value) = self.value(name) else {
            return Ok(None);
        };
        let wrong = |why: &dyn Display| format!("{name}={value}: {why}, as in {example}");
        let number_end = value
            .find(|c: char| !c.is_ascii_digit() && c != '.')
            .unwrap_or(value.len());
        let (number, unit) = value.split_at(number_end);
        let Some(power) = units.iter().position(|of| *of == unit) else {
            return Err(wrong(&format!("write a number with {}", units.join(", "))));
        };
        match number.parse::<f64>() {
            Ok(number) if number > 0.0 => Ok(Some(number * 1e3f64.powi(power as i32))),
            _ => Err(wrong(&"write a number larger than 0")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<VirtualArg, String> {
        text.parse()
    }

    #[test]
    fn a_device_that_computes_has_memory_and_perhaps_a_link() {
        for text in ["memory=1.5Gi", "mode=exact,memory=1.5Gi"] {
            let device = parse(text).unwrap();
            assert_eq!(device.memory_bytes, 3 << 29);
            let unlimited = VirtualMode::Exact {
                copy_bytes_per_s: None,
            };
            assert_eq!(device.mode, unlimited);
            assert!(!device.is_modelled());
        }
        let mode = parse("memory=1Gi,copy=1.5GB/s").unwrap().mode;
        let limited = VirtualMode::Exact {
            copy_bytes_per_s: Some(1.5e9),
        };
        assert_eq!(mode, limited);
    }

    #[test]
    fn a_file_has_a_device_lost_for_the_cause_in_it() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("fault");
        let device = parse(&format!("memory=1Gi,fault={}", file.display())).unwrap();
        assert_eq!(device.lost(), None);
        std::fs::write(&file, "Xid 79\n").unwrap();
        assert_eq!(device.lost().as_deref(), Some("Xid 79"));
        std::fs::write(&file, "").unwrap();
        assert!(device.lost().unwrap().contains("exists"));
    }

    #[test]
    fn a_modelled_device_has_rates() {
        let least = "memory=1Gi,mode=modelled,copy=50GB/s,read=3TB/s,compute=50TFLOPS";
        let of_least = Modelled {
            copy_bytes_per_s: 50e9,
            read_bytes_per_s: 3e12,
            compute_flops: 50e12,
            launch_us: 5.0,
            stretch: 10.0,
            routing: RoutingModel::Uniform,
            seed: 1,
            copies: CopyModel::None,
        };
        let modelled = |text: &str| match parse(text).unwrap().mode {
            VirtualMode::Modelled(modelled) => modelled,
            VirtualMode::Exact { .. } => panic!("{text} computes"),
        };
        assert_eq!(modelled(least), of_least);
        let more = "launch=0.5ms,stretch=2,routing=zipf:1.1,seed=7,copies=real";
        let of_more = Modelled {
            launch_us: 500.0,
            stretch: 2.0,
            routing: RoutingModel::Zipf { exponent: 1.1 },
            seed: 7,
            copies: CopyModel::Real,
            ..of_least
        };
        assert_eq!(modelled(&format!("{least},{more}")), of_more);
    }

    #[test]
    fn what_makes_no_sense_is_refused_with_what_to_write() {
        let rates = "memory=1Gi,mode=modelled,copy=1GB/s,read=1GB/s,compute=1TFLOPS";
        for (wrong, says) in [
            ("", "needs memory"),
            ("memory", "memory="),
            ("memory=many", "memory=many"),
            ("memory=0", "0 bytes"),
            ("memory=0.5", "0 bytes"),
            ("memory=1Gi,", "no property ``"),
            ("memory=1Gi,mode=fast", "mode=modelled"),
            ("memory=1Gi,memory=2Gi", "twice"),
            ("memory=1Gi,fault", "fault is empty"),
            ("memory=1Gi,speed=2", "no property `speed=2`"),
            ("memory=1Gi,speed=2", "fault, and count for plans"),
            ("memory=1Gi,count=2", "leave it out"),
            ("memory=1Gi,read=1GB/s", "read has no effect"),
            ("memory=1Gi,mode=exact,seed=1", "seed has no effect"),
            ("memory=1Gi,copy=1", "GB/s"),
            ("memory=1Gi,copy=0GB/s", "larger than 0"),
            ("memory=1Gi,copy=-1GB/s", "copy=1GB/s"),
            ("memory=1Gi,copy=1..GB/s", "larger than 0"),
            ("memory=1Gi,mode=modelled", "needs copy"),
            ("memory=1Gi,mode=modelled,copy=1GB/s", "needs read"),
            (&format!("{rates},launch=5"), "launch=5us"),
            (&format!("{rates},stretch=0"), "stretch=10"),
            (&format!("{rates},routing=zipf"), "zipf:1.1"),
            (&format!("{rates},routing=zipf:0"), "zipf:1.1"),
            (&format!("{rates},seed=x"), "integer"),
            (&format!("{rates},copies=some"), "copies=real"),
        ] {
            let error = parse(wrong).unwrap_err();
            assert!(error.contains(says), "{wrong}: {error}");
        }
    }
}
