// SPDX-License-Identifier: Apache-2.0

package main

import (
	"archive/tar"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/validate"
)

// serveRegistry starts a registry that accepts only user "u" with password "p", and returns its host and port.
func serveRegistry(t *testing.T) string {
	t.Helper()
	inner := registry.New(registry.Logger(log.New(io.Discard, "", 0)))
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if user, password, _ := r.BasicAuth(); user != "u" || password != "p" {
			w.Header().Set("WWW-Authenticate", `Basic realm="test"`)
			http.Error(w, `{"errors":[{"code":"UNAUTHORIZED","message":"who are you?"}]}`, http.StatusUnauthorized)
			return
		}
		inner.ServeHTTP(w, r)
	}))
	t.Cleanup(server.Close)
	return strings.TrimPrefix(server.URL, "http://")
}

func smallIndex(t *testing.T) v1.ImageIndex {
	t.Helper()
	f := writeFile(t, filepath.Join(t.TempDir(), "f"), "text", 0o644)
	index := v1.ImageIndex(empty.Index)
	for _, p := range platforms() {
		layer, err := newLayer([]imageEntry{{path: "/" + p.Architecture, kind: tar.TypeReg, from: f, mode: 0o644}}, time.Unix(0, 0))
		if err != nil {
			t.Fatal(err)
		}
		img, err := newImage(p, v1.Config{}, layer, time.Unix(0, 0))
		if err != nil {
			t.Fatal(err)
		}
		index = mutate.AppendManifests(index, mutate.IndexAddendum{Add: img})
	}
	return index
}

// TestPush pushes images with the credentials that docker login saved, and pulls the same ones.
func TestPush(t *testing.T) {
	host, index := serveRegistry(t), smallIndex(t)
	tag, err := imageName(host + "/team/podlace:v1")
	if err != nil {
		t.Fatal(err)
	}
	login := t.TempDir()
	t.Setenv("DOCKER_CONFIG", login)
	t.Setenv("REGISTRY_AUTH_FILE", "")
	t.Setenv("XDG_RUNTIME_DIR", login)

	err = pushIndex(tag, index)
	for _, want := range []string{"registry " + host + " refused", "/team/podlace:v1", "docker login " + host} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Fatalf("without credentials: %v, want it to say %s", err, want)
		}
	}

	writeFile(t, filepath.Join(login, "config.json"), fmt.Sprintf(`{"auths": {%q: {"username": "u", "password": "p"}}}`, host), 0o600)
	if err := pushIndex(tag, index); err != nil {
		t.Fatal(err)
	}
	pulled, err := remote.Index(tag, remote.WithAuthFromKeychain(authn.DefaultKeychain))
	if err != nil {
		t.Fatal(err)
	}
	if err := validate.Index(pulled); err != nil {
		t.Error(err)
	}
	if a, b := digest(t, index), digest(t, pulled); a != b {
		t.Errorf("pushed %s, pulled %s", a, b)
	}
}

// TestPushToNowhere checks that the error of a failed push contains the image and the failed step.
func TestPushToNowhere(t *testing.T) {
	server := httptest.NewServer(http.NotFoundHandler())
	host := strings.TrimPrefix(server.URL, "http://")
	server.Close()
	tag, err := imageName(host + "/podlace:v1")
	if err != nil {
		t.Fatal(err)
	}
	if err := pushIndex(tag, smallIndex(t)); err == nil || !strings.Contains(err.Error(), "push of "+tag.String()) ||
		!strings.Contains(err.Error(), "connection refused") {
		t.Errorf("%v", err)
	}
}
