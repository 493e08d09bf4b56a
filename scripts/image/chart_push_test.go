// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"io"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/registry"
	"helm.sh/helm/v4/pkg/chart/v2/loader"
	helm "helm.sh/helm/v4/pkg/registry"
)

// TestChartPush checks that Helm can pull a chart that `make chart PUSH=` pushed.
func TestChartPush(t *testing.T) {
	server := httptest.NewServer(registry.New())
	t.Cleanup(server.Close)
	host, out := strings.TrimPrefix(server.URL, "http://"), t.TempDir()
	args := []string{"chart", "-image", testImage, "-conf", conf, "-version", "v1.2.3", "-out", out, "-push", host + "/charts"}
	if err := run(args); err != nil {
		t.Fatal(err)
	}
	client, err := helm.NewClient(helm.ClientOptPlainHTTP(), helm.ClientOptWriter(io.Discard),
		helm.ClientOptCredentialsFile(filepath.Join(out, "none.json")))
	if err != nil {
		t.Fatal(err)
	}
	pulled, err := client.Pull(host + "/charts/podlace:1.2.3")
	if err != nil {
		t.Fatal(err)
	}
	archive, err := os.ReadFile(filepath.Join(out, "podlace-1.2.3.tgz"))
	if err != nil || !bytes.Equal(pulled.Chart.Data, archive) {
		t.Errorf("%v, the pulled archive differs", err)
	}
	c, err := loader.LoadArchive(bytes.NewReader(pulled.Chart.Data))
	if err != nil || c.Metadata.Version != "1.2.3" || c.Metadata.AppVersion != "v1.2.3" {
		t.Errorf("%v, %+v", err, c)
	}
}
