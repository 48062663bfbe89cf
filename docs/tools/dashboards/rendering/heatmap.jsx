// A panel of Perses: the buckets of a histogram over time, a row each, as Grafana draws them. Perses' own
// panel draws native histograms alone.
import { EChart, formatWithTimeZone, useChartsTheme, useTimeZone } from '@perses-dev/components';
import { formatValue } from '@perses-dev/core';
import { HeatmapChart } from 'echarts/charts';
import { VisualMapComponent } from 'echarts/components';
import { use } from 'echarts/core';

use([HeatmapChart, VisualMapComponent]);
const COLOURS = ['#deebf7', '#9ecae1', '#4292c6', '#08519c', '#08306b'];

// From cumulative series, one an upper bound: the bounds between which there is anything, and
// [column, row, count] of what is not empty.
function cells(series) {
  const bounds = [...series].sort((one, other) => Number(one.labels.le.replace('+Inf', 'Infinity')) - Number(other.labels.le.replace('+Inf', 'Infinity')));
  const times = [...new Set(bounds.flatMap((one) => one.values.map(([time]) => time)))].sort((one, other) => one - other);
  const upTo = bounds.map((one) => new Map(one.values));
  const found = [];
  times.forEach((time, column) => {
    let below = 0;
    upTo.forEach((counts, row) => {
      const all = counts.get(time) ?? below;
      if (all - below > 1e-6) found.push([column, row, all - below]);
      below = Math.max(below, all);
    });
  });
  const rows = found.map(([, row]) => row);
  const lowest = Math.max(0, Math.min(...rows) - 1), highest = Math.max(...rows);
  return {
    times,
    bounds: bounds.slice(lowest, highest + 1).map((one) => one.labels.le),
    counts: found.map(([column, row, count]) => [column, row - lowest, count]),
  };
}

function BucketsHeatMap({ spec, contentDimensions, queryResults }) {
  const theme = useChartsTheme();
  const { timeZone } = useTimeZone();
  const series = queryResults.flatMap((result) => result?.data?.series ?? []);
  const { times, bounds, counts } = cells(series);
  if (!contentDimensions || !counts.length) return <p style={{ textAlign: 'center' }}>No data</p>;
  const option = {
    grid: { left: 8, right: 16, top: 12, bottom: 4, containLabel: true },
    xAxis: {
      type: 'category',
      data: times.map((time) => formatWithTimeZone(new Date(time), 'HH:mm:ss', timeZone)),
      axisLabel: { hideOverlap: true },
    },
    yAxis: {
      type: 'category',
      data: bounds.map((le) => (le === '+Inf' ? 'more' : `≤ ${formatValue(Number(le), spec.yAxisFormat)}`)),
      axisLabel: { hideOverlap: true },
    },
    visualMap: { show: false, min: 0, max: Math.max(...counts.map(([, , count]) => count)), inRange: { color: COLOURS } },
    series: [{ type: 'heatmap', data: counts, animation: false, itemStyle: { borderColor: '#fff', borderWidth: 1 } }],
  };
  const { width, height } = contentDimensions;
  return <EChart sx={{ width, height }} option={option} theme={theme.echartsTheme} />;
}

export const plugin = {
  resource: {
    kind: 'PluginModule',
    metadata: { name: 'buckets', version: '0' },
    spec: { plugins: [{ kind: 'Panel', spec: { name: 'BucketsHeatMap', display: { name: 'Buckets over time' } } }] },
  },
  importPlugin: async () => ({
    BucketsHeatMap: {
      PanelComponent: BucketsHeatMap,
      supportedQueryTypes: ['TimeSeriesQuery'],
      createInitialOptions: () => ({}),
    },
  }),
};
