//! Series that are written as they are read, without being kept.

use std::fmt;

use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric as _, MetricEncoder};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;

/// What a metric's values are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Gauge,
    /// Only increases; its name gets the suffix `_total`.
    Counter,
}

/// Names and values of labels.
pub(super) type Labels<'a> = [(&'static str, &'a str)];

/// A metric of items of one type.
pub(super) struct Family<T> {
    pub(super) name: &'static str,
    pub(super) help: &'static str,
    pub(super) kind: Kind,
    /// Writes the series of one item.
    pub(super) series: fn(&T, &mut Sink<'_, '_>) -> fmt::Result,
}

impl<T> Family<T> {
    /// Writes the metric for all items, each with the labels that all of its series have.
    pub(super) fn encode<'i, const N: usize>(
        &self,
        encoder: &mut DescriptorEncoder<'_>,
        items: impl Iterator<Item = ([(&'static str, &'i str); N], &'i T)>,
    ) -> fmt::Result
    where
        T: 'i,
    {
        let type_ = match self.kind {
            Kind::Gauge => MetricType::Gauge,
            Kind::Counter => MetricType::Counter,
        };
        let mut encoder = encoder.encode_descriptor(self.name, self.help, None, type_)?;
        for (labels, item) in items {
            let mut sink = Sink {
                encoder: &mut encoder,
                labels: &labels,
                kind: self.kind,
            };
            (self.series)(item, &mut sink)?;
        }
        Ok(())
    }
}

/// Where the series of one item go.
pub(super) struct Sink<'a, 'e> {
    encoder: &'a mut MetricEncoder<'e>,
    labels: &'a Labels<'a>,
    kind: Kind,
}

impl Sink<'_, '_> {
    /// Writes a series with these labels beside the item's.
    pub(super) fn put(&mut self, labels: &Labels<'_>, value: f64) -> fmt::Result {
        let labels: Vec<(&str, &str)> = self.labels.iter().chain(labels).copied().collect();
        let encoder = self.encoder.encode_family(&labels)?;
        match self.kind {
            Kind::Gauge => ConstGauge::new(value).encode(encoder),
            Kind::Counter => ConstCounter::new(value).encode(encoder),
        }
    }

    /// Writes 1 or 0.
    pub(super) fn put_flag(&mut self, labels: &Labels<'_>, holds: bool) -> fmt::Result {
        self.put(labels, f64::from(u8::from(holds)))
    }

    /// Writes the item's only series if it has a value.
    pub(super) fn put_some(&mut self, value: Option<f64>) -> fmt::Result {
        value.map_or(Ok(()), |value| self.put(&[], value))
    }
}
