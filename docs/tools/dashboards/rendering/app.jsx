// Draws one dashboard of Perses, without a server of Perses.
import { CssBaseline, ThemeProvider } from '@mui/material';
import { ChartsProvider, SnackbarProvider, generateChartsTheme, getTheme } from '@perses-dev/components';
import { ViewDashboard } from '@perses-dev/dashboards';
import { PluginRegistry, TimeRangeProvider, dynamicImportPluginLoader } from '@perses-dev/plugin-system';
import * as prometheus from '@perses-dev/prometheus-plugin';
import * as stat from '@perses-dev/stat-chart-plugin';
import * as table from '@perses-dev/table-plugin';
import * as timeseries from '@perses-dev/timeseries-chart-plugin';
import { QueryClient, QueryClientProvider } from '@tanstack/react-query';
import { createRoot } from 'react-dom/client';
import { RouterProvider, createMemoryRouter } from 'react-router-dom';
import { QueryParamProvider } from 'use-query-params';
import { WindowHistoryAdapter } from 'use-query-params/adapters/window';
import { plugin as buckets } from './heatmap.jsx';

const plugins = dynamicImportPluginLoader([
  buckets,
  ...[prometheus, timeseries, stat, table].map((one) => ({
    resource: one.getPluginModule(),
    importPlugin: () => Promise.resolve(one),
  })),
]);
// Apart from each other for most eyes, and apart from the colours of pages' states.
const COLOURS = ['#3b6fd4', '#e8833a', '#2a9d8f', '#c2457a', '#8a6bd1', '#9c7a3c', '#5aa9e6', '#7a8b99', '#d4b106', '#4c956c'];
// Room for the uppermost label, and for labels of times beside each other.
const CHARTS = { echartsTheme: { color: COLOURS, grid: { top: 14, right: 32 }, timeAxis: { splitNumber: 4 } } };
const kinds = { Panel: 'TimeSeriesChart', TimeSeriesQuery: 'PrometheusTimeSeriesQuery' };
const theme = getTheme('light');
const client = new QueryClient({ defaultOptions: { queries: { retry: false, refetchOnWindowFocus: false } } });
const noOtherSources = {
  getDatasource: async () => undefined,
  getGlobalDatasource: async () => undefined,
  listDatasources: async () => [],
  listGlobalDatasources: async () => [],
};

// The range of time stands in the page's address, as `start` and `end` in milliseconds.
window.show = (dashboard, range) => {
  const page = (
    <TimeRangeProvider timeRange={range} refreshInterval="0s">
      <QueryParamProvider adapter={WindowHistoryAdapter}>
        <ViewDashboard
          dashboardResource={dashboard}
          datasourceApi={noOtherSources}
          isReadonly
          isVariableEnabled={false}
          isDatasourceEnabled={false}
          isLeavingConfirmDialogEnabled={false}
        />
      </QueryParamProvider>
    </TimeRangeProvider>
  );
  createRoot(document.getElementById('root')).render(
    <ThemeProvider theme={theme}>
      <CssBaseline />
      <ChartsProvider chartsTheme={generateChartsTheme(theme, CHARTS)}>
        <SnackbarProvider>
          <QueryClientProvider client={client}>
            <PluginRegistry pluginLoader={plugins} defaultPluginKinds={kinds}>
              <RouterProvider router={createMemoryRouter([{ path: '*', element: page }])} />
            </PluginRegistry>
          </QueryClientProvider>
        </SnackbarProvider>
      </ChartsProvider>
    </ThemeProvider>
  );
};
